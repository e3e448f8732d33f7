"""A front and a replica without Ray: what they make of requests, of the answers of all hosts, and of a full disk."""

import asyncio
import contextlib
import io
import sys

import aiohttp
import pytest
from starlette.datastructures import Headers

pytest.importorskip("ray", reason="needs the extra [ray]")

from mini_engine.cluster.engine_replica import write_log  # noqa: E402
from mini_engine.cluster.front import HostAnswer, ask_all, attempts, attempts_at_each, engine_headers, merge_expositions  # noqa: E402
from mini_engine.cluster.router import Attempt  # noqa: E402
from mini_engine.cluster.routing import ranked  # noqa: E402
from mini_engine.config import EngineConfig  # noqa: E402
from mini_engine.http.access import SHARED_KEY, Access  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own


async def test_a_hung_host_has_the_status_504_and_delays_no_other_answer_and_one_that_is_gone_has_none() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /hung "):
            await reader.read()  # until the front closes the connection
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nhealthy")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        urls = {"hung": f"{url}/hung", "healthy": f"{url}/healthy", "gone": "http://127.0.0.1:1/gone"}
        requests = {host: session.get(target) for host, target in urls.items()}
        async with contextlib.aclosing(ask_all(requests, 3600)) as answers:
            assert {(await anext(answers)).host for _ in range(2)} == {"healthy", "gone"}
        requests = {host: session.get(urls[host]) for host in ("hung", "gone")}
        answers_in_time = {answer.host: answer async for answer in ask_all(requests, 0.5)}
    assert answers_in_time["gone"] == HostAnswer("gone", 0, b"")
    assert answers_in_time["hung"].status == 504 and b'"timeout"' in answers_in_time["hung"].body


def choose(attempt: Attempt) -> str:
    """The router's choice among two hosts."""
    attempt.tried = ranked("", {"a": 0, "b": 0}, attempt.avoided)[0]
    return attempt.tried


def test_each_host_is_tried_whether_or_not_those_before_have_granted_a_lease() -> None:
    tried = [choose(attempt) for attempt in attempts_at_each(None)]
    assert {*tried[:2]} == {"a", "b"} and len(tried) == 3
    assert len([*attempts_at_each(None)]) == 1, "none has room"


async def test_a_front_pauses_before_it_tries_a_host_again() -> None:
    async with contextlib.aclosing(attempts(None, {})) as failing:
        tried = {choose(await anext(failing)) for _ in range(2)}
        assert choose(await anext(failing)) in tried == {"a", "b"}
        again = asyncio.ensure_future(anext(failing))
        await asyncio.sleep(0)
        assert not again.done()
        await again


def test_metrics_of_hosts_are_one_exposition_with_each_metric_once_and_without_errors() -> None:
    text = b'# HELP a What.\n# TYPE a gauge\na{x="1"} 2\na{x="2"} 3\n# HELP b Else.\n# TYPE b counter\nb 4\n'
    error = HostAnswer("e", 503, b'{"error":{"message":"out of file descriptors"}}')
    other = HostAnswer("i", 200, b"# HELP a What.\n# TYPE a gauge\na 5\n")
    assert merge_expositions([HostAnswer("h", 200, text), error, other]) == (
        '# HELP a What.\n# TYPE a gauge\na{host="h",x="1"} 2\na{host="h",x="2"} 3\na{host="i"} 5\n'
        '# HELP b Else.\n# TYPE b counter\nb{host="h"} 4\n'
    )


@pytest.mark.parametrize(
    "keys, client_key, sent",
    [([], "", {SHARED_KEY, "authorization"}), (["k"], "k", {"authorization"}), (["k"], "", set())],
)
def test_requests_of_clients_without_keys_have_the_header_of_a_shared_key(
    keys: list[str], client_key: str, sent: set[str]
) -> None:
    """Else a stranger could ask about an image by the name that another has given it."""
    headers = Headers({"authorization": f"Bearer {client_key}"})
    assert dict(engine_headers(headers, Access(EngineConfig(api_key=keys)), "e")).keys() == sent


def test_a_full_disk_loses_lines_of_the_log_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        with pytest.raises(OSError):
            full.write("line\n")
        monkeypatch.setattr(sys, "stderr", full)
        write_log("line\n")
