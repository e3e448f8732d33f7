"""A host that gives an API server no more descriptors, memory or threads: whom it tells, what it logs, what goes on."""

from __future__ import annotations

import asyncio
import base64
import errno
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from mini_engine.api import error_responses
from mini_engine.api.error_responses import QUIET_SECONDS, explain
from mini_engine.api.threads import Threads
from mini_engine.api.timings import RequestClock
from mini_engine.media import http_fetch
from mini_engine.media.errors import DecoderUnavailable
from mini_engine.media.policy import MediaPolicy
from mini_engine.media.processor import MediaProcessor
from tests.api.patience import PATIENCE
from tests.api.serving import Served, image, media_loader, serve, words
from tests.api.test_app import metric
from tests.shortages import no_descriptors, no_threads
from tests.web import WebServer, response


@pytest.fixture(autouse=True)
def before_any_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_responses, "_refused_at", {})
    monkeypatch.setattr(error_responses, "refusals", error_responses.RefusalLog())


def shortages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "gets no more" in record.getMessage()]


def assert_short(answer: httpx.Response, what: str) -> None:
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "overloaded")
    assert what in error["message"] and "Errno" not in error["message"]


def test_without_descriptors_nobody_is_blamed_and_with_them_all_goes_on(
    processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    png = base64.b64decode(image()["image_url"]["url"].partition(",")[2])

    def part(url: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": url}}]

    async def ask_all(served: Served, urls: list[str]) -> list[httpx.Response]:
        return [await served.post(content=part(url)) for url in urls]

    async def scenario() -> None:
        with WebServer(response(png)) as web:
            async with serve(processor, tmp_path, words(processor, *["right"] * 3)) as served:
                (tmp_path / "allowed" / "a.png").write_bytes(png)
                urls = [f"file://{tmp_path}/allowed/a.png", f"http://127.0.0.1:{web.port}/a.png"]
                assert (await served.post()).status_code == 200  # on the connection that stays open
                before = metric("requests_rejected_total", reason="host")
                with no_descriptors():
                    for answer in await ask_all(served, urls * 3):
                        assert_short(answer, "open files")
                    assert_short(await served.http.get("/version"), "open files")
                    assert (await served.post()).status_code == 200
                assert len(shortages(caplog)) == 1 and "ulimit -n" in shortages(caplog)[0]
                assert metric("requests_rejected_total", reason="host") == before + 7
                for answer in await ask_all(served, urls):
                    assert answer.status_code == 200, answer.text
                assert served.context.admission.inflight_bytes == served.context.admission.admitted == 0

    asyncio.run(scenario())


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
def test_whatever_fails_for_it_is_told_so(error: Exception, status: int) -> None:
    assert explain(error, "id", RequestClock()).status == status


def test_the_log_has_a_line_for_each_shortage_not_for_each_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(error_responses.time, "monotonic", lambda: now)

    def refused(error: Exception, seconds: float) -> int:
        nonlocal now
        now += seconds
        explain(error, "id", RequestClock())
        return len(shortages(caplog))

    assert [refused(MemoryError(), QUIET_SECONDS - 1) for _ in range(5)] == [1] * 5
    assert refused(OSError(errno.EMFILE, "x"), 0) == 2  # another one
    assert refused(MemoryError(), QUIET_SECONDS + 1) == 3


def test_work_that_gets_no_thread_is_done_by_those_that_are_there() -> None:
    async def scenario() -> None:
        pool, gate = Threads(4, "test"), threading.Event()
        loop = asyncio.get_running_loop()
        with no_threads():
            done = [loop.run_in_executor(pool, gate.wait), *(loop.run_in_executor(pool, int) for _ in range(3))]
            gate.set()
            assert await asyncio.wait_for(asyncio.gather(*done), PATIENCE) == [True, 0, 0, 0]
        pool.shutdown()

    asyncio.run(scenario())


def test_without_any_thread_there_is_no_pool() -> None:
    with no_threads(), pytest.raises(RuntimeError):
        Threads(4, "test")


def test_certificates_are_read_while_there_are_descriptors(processor: MediaProcessor) -> None:
    """Without one OpenSSL would take their file for empty, for as long as the process lives."""
    http_fetch.tls_context.cache_clear()
    for hosts, read in (([], 0), (["media.test"], 1)):
        media_loader(processor, MediaPolicy(None, 1000, hosts)).close()
        assert http_fetch.tls_context.cache_info().currsize == read
