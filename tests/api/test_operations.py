"""/health, and a host that gives an API server no more descriptors, memory or threads."""

from __future__ import annotations

import asyncio
import base64
import errno
from pathlib import Path

import pytest

from mini_engine.api.errors import explain
from mini_engine.api.media_loader import start_thread_pool
from mini_engine.media import http_fetch
from mini_engine.media.errors import DecoderUnavailable
from mini_engine.media.policy import MediaPolicy
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import ControlReply
from tests.api.patience import PATIENCE, run_patiently
from tests.api.peers import Calls, eventually
from tests.api.serving import Served, image, media_loader, serve, words
from tests.api.test_app import metric
from tests.shortages import no_descriptors, no_threads

WITHIN = 0.3


async def health(served: Served) -> tuple[int, str | None]:
    """Status and error code."""
    response = await served.http.get("/health")
    return response.status_code, response.json()["error"]["code"] if response.content else None


def test_health_is_a_ping_that_simultaneous_requests_share(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            assert await health(served) == (200, None)
            assert served.core.controls["ping"] == [1]
            served.core.replies_to.discard("ping")
            calls = Calls(served.context.engines, "healthy")
            asking = [asyncio.create_task(health(served)) for _ in range(5)]
            await served.core.until(lambda: len(served.core.controls["ping"]) == 2)
            await eventually(lambda: calls.begun == 5)
            await served.core.tell(ControlReply(2))
            assert await asyncio.gather(*asking) == [(200, None)] * 5
            assert served.core.controls["ping"] == [1, 2]

    run_patiently(scenario())


def test_health_of_an_engine_that_hangs(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor), settings={"health_timeout": WITHIN}) as served:
            served.core.replies_to.discard("ping")
            begun = asyncio.get_running_loop().time()
            assert await health(served) == (503, "timeout")
            assert WITHIN <= asyncio.get_running_loop().time() - begun < WITHIN + 1
            assert await health(served) == (503, "timeout")
            head = await served.http.head("/health")
            assert (head.status_code, head.content) == (503, b"")
            assert served.core.controls["ping"] == [1], "a second ping while the first is unanswered"
            assert (await served.http.get("/live")).status_code == 200

            served.core.replies_to.add("ping")
            await served.core.tell(ControlReply(1))
            assert await health(served) == (200, None)
            await served.core.tell(ControlReply(1))  # of an old ping: no answer to the next
            served.core.replies_to.discard("ping")
            assert await health(served) == (503, "timeout")

    run_patiently(scenario())


def test_health_of_an_engine_that_dies(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            served.core.replies_to.discard("ping")
            begun = asyncio.get_running_loop().time()
            asking = asyncio.create_task(health(served))
            await eventually(lambda: served.core.controls["ping"] == [1])
            served.context.engines.peer_gone("core 0")
            assert await asking == (503, "engine_unavailable") == await health(served)
            assert asyncio.get_running_loop().time() - begun < 1
            assert (await served.http.get("/live")).status_code == 200

    run_patiently(scenario())


def test_a_cancelled_probe_does_not_cancel_another(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            served.core.replies_to.discard("ping")
            engines = served.context.engines
            leaving, staying = (asyncio.create_task(engines.healthy(PATIENCE)) for _ in range(2))
            await served.core.until(lambda: served.core.controls["ping"] == [1])
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await served.core.tell(ControlReply(1))
            assert await staying

    run_patiently(scenario())


def test_without_descriptors_a_request_that_needs_one_is_a_503(
    processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *["right"] * 3)) as served:
            file = tmp_path / "allowed" / "a.png"
            file.write_bytes(base64.b64decode(image()["image_url"]["url"].partition(",")[2]))
            content = [{"type": "image_url", "image_url": {"url": f"file://{file}"}}]
            assert (await served.post()).status_code == 200  # on the connection that stays open
            before = metric("requests_rejected_total", reason="host")
            with no_descriptors():
                for answer in (await served.post(content=content), await served.http.get("/version")):
                    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
                    assert answer.json()["error"]["code"] == "overloaded"
                    assert "file descriptors" in answer.text and "Errno" not in answer.text
                assert (await served.post()).status_code == 200
            assert metric("requests_rejected_total", reason="host") == before + 2
            assert (await served.post(content=content)).status_code == 200
            assert served.context.admission.inflight_bytes == served.context.admission.num_admitted == 0

    asyncio.run(scenario())
    assert sum("out of file descriptors" in record.getMessage() for record in caplog.records) <= 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), 503),
        (OSError(errno.ENFILE, "Too many open files in system"), 503),
        (RuntimeError("can't start new thread"), 503),
        (DecoderUnavailable("video 1", "no media decoder was free"), 503),
        (OSError(errno.EIO, "Input/output error"), 500),
    ],
)
def test_a_shortage_of_the_host_is_a_503(error: Exception, status: int) -> None:
    async def scenario() -> None:
        assert explain(error, "id", None).status == status

    asyncio.run(scenario())


def test_a_thread_pool_starts_all_its_threads_or_fails() -> None:
    pool = start_thread_pool(4, "test")
    with no_threads():
        assert [one.result() for one in [pool.submit(int) for _ in range(9)]] == [0] * 9
        with pytest.raises(RuntimeError):
            start_thread_pool(4, "test")
    pool.shutdown()


def test_certificates_are_read_while_there_are_descriptors(processor: MediaProcessor) -> None:
    """Without one OpenSSL would take their file for empty, for as long as the process lives."""
    http_fetch.tls_context.cache_clear()
    for hosts, read in (([], 0), (["media.test"], 1)):
        media_loader(processor, MediaPolicy(None, 1000, hosts)).close()
        assert http_fetch.tls_context.cache_info().currsize == read
