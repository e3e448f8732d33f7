"""What a front makes of requests and of the answers of all hosts, which are web servers here, without Ray."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from starlette.datastructures import Headers

pytest.importorskip("ray", reason="needs the extra [ray]")

from mini_engine.cluster.front import HostAnswer, ask_all, attempts, attempts_at_each, engine_headers, merge_expositions  # noqa: E402
from mini_engine.cluster.router import Attempt  # noqa: E402
from mini_engine.cluster.routing import ranked  # noqa: E402
from mini_engine.config import EngineConfig  # noqa: E402
from mini_engine.http.access import SHARED_KEY, Access  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own


@contextlib.asynccontextmanager
async def hosts() -> AsyncIterator[dict[str, aiohttp.client._RequestContextManager]]:
    """A request to one that never answers, to one that is healthy, and to one that is gone."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/hung":
            await asyncio.Event().wait()
        return web.Response(text="healthy")

    app = web.Application()
    app.add_routes([web.get("/{name}", answer)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as session:
        names = {"hung": f"{url}/hung", "healthy": f"{url}/healthy", "gone": "http://127.0.0.1:1/gone"}
        yield {name: session.get(target) for name, target in names.items()}
    await runner.cleanup()


async def test_a_hung_host_delays_no_other_answer() -> None:
    async with hosts() as requests, contextlib.aclosing(ask_all(requests, 3600)) as answers:
        first_two = {(await anext(answers)).host for _ in range(2)}
    assert first_two == {"healthy", "gone"}


async def test_a_host_without_an_answer_in_time_has_the_status_504_and_one_that_is_gone_has_none() -> None:
    async with hosts() as requests:
        requests.pop("healthy").close()
        answers = {answer.host: answer async for answer in ask_all(requests, 0.5)}
    assert answers["gone"] == HostAnswer("gone", 0, b"")
    assert answers["hung"].status == 504 and b'"timeout"' in answers["hung"].body


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
