"""What is too much: for a server at present, which says so at once and keeps nothing of it, and for any time."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import gc
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mini_engine.api.protocol import ChatRequest
from mini_engine.config import flag_of
from mini_engine.decode_limits import DecodeLimits
from mini_engine.media.policy import BLOCK_BYTES
from mini_engine.media.processor import MediaProcessor
from tests.api.patience import PATIENCE
from tests.api.peers import eventually
from tests.api.serving import (
    MAX_INFLIGHT_BYTES,
    MAX_MEDIA_BYTES,
    Served,
    hang_up,
    image,
    media_loader,
    serve,
    words,
)
from tests.api.test_app import metric
from tests.api.test_media_loader import Gated
from tests.api.test_media_settings import video
from tests.web import WebServer, response


class SlowWeb:
    """A web server whose answer, an image, waits for `go`."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self.png = base64.b64decode(image()["image_url"]["url"].partition(",")[2])
        self.body = self.png

    def answer(self, connection: socket.socket, _: str) -> None:
        self.asked.set()
        assert self.go.wait(PATIENCE)
        connection.sendall(response(self.body))

    @contextlib.contextmanager
    def running(self) -> Iterator[dict[str, Any]]:
        """A content part that names the image."""
        with WebServer(self.answer) as web:
            try:
                yield {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{web.port}/a.png"}}
            finally:
                self.go.set()


def with_server(processor: MediaProcessor, directory: Path, test: Callable[[Served], Any], **more: Any) -> None:
    async def scenario() -> None:
        async with serve(processor, directory, words(processor, "a red", " circle"), **more) as served:
            await test(served)
            await eventually(lambda: at_rest(served))
            assert metric("inflight_media_bytes") == 0

    asyncio.run(scenario())


def at_rest(served: Served) -> bool:
    front = served.context
    return front.admission.inflight_bytes == front.admission.num_admitted == front.requests.unfinished == 0


def check_refusal(response: httpx.Response, flag: str) -> None:
    assert response.status_code == 429, response.text
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-request-id"].startswith("chatcmpl-")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert flag in error["message"]


def padded(slow: SlowWeb) -> SlowWeb:
    """Its image has as many bytes as one may."""
    slow.body = slow.png + bytes(MAX_MEDIA_BYTES - len(slow.png))
    return slow


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_are_in_flight_until_the_engine_has_accepted(
    processor: MediaProcessor, tmp_path: Path, stream: bool
) -> None:
    async def scenario(served: Served) -> None:
        slow, before = padded(SlowWeb()), metric("requests_rejected_total", reason="inflight_media")
        served.core.accepts = False
        slow.go.set()
        with slow.running() as part:
            first = asyncio.create_task(served.post(content=[part] * 4, stream=stream))
            await served.core.until(lambda: bool(served.core.requests))
            assert metric("inflight_media_bytes") == 4 * MAX_MEDIA_BYTES == MAX_INFLIGHT_BYTES
            for other in (part, image()):
                check_refusal(await served.post(content=[other], stream=stream), "--max-inflight-media-gb")
            assert metric("requests_rejected_total", reason="inflight_media") == before + 2
            await served.core.accept(served.core.requests[0])
            assert (await first).status_code == 200
        served.core.accepts = True
        assert (await served.post(content=[image()], stream=stream)).status_code == 200

    with_server(processor, tmp_path, scenario)


def test_a_web_server_that_hangs_delays_no_other_request(processor: MediaProcessor, tmp_path: Path) -> None:
    """More of its items than places and threads that decode."""

    async def scenario(served: Served) -> None:
        slow = SlowWeb()
        with slow.running() as part:
            hanging = [asyncio.create_task(served.post(content=[part])) for _ in range(6)]
            await eventually(slow.asked.is_set)
            answers = await asyncio.gather(*(served.post(content=[image()]) for _ in range(4)))
            assert [answer.status_code for answer in answers] == [200] * 4
            slow.go.set()
            assert [(await one).status_code for one in hanging] == [200] * 6

    with_server(processor, tmp_path, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_downloads_of_one_request_end_with_the_block_that_is_too_much(
    processor: MediaProcessor, tmp_path: Path, stream: bool
) -> None:
    """None of them is too large or ends of itself: six send all but their last byte."""

    async def scenario(served: Served) -> None:
        gone = threading.Semaphore(0)

        def answer(connection: socket.socket, _: str) -> None:
            with contextlib.suppress(OSError):
                connection.sendall(response(bytes(MAX_MEDIA_BYTES))[:-1])
                connection.recv(1)  # until the download is given up
            gone.release()

        with WebServer(answer) as web:
            part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{web.port}/"}}
            async with asyncio.timeout(PATIENCE):
                refusal = await served.post(content=[part] * 6, stream=stream)
            assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, "media_too_large")
            assert f"more than the {MAX_INFLIGHT_BYTES} of --max-inflight-media-gb" in refusal.text
            nbytes = int(refusal.text.partition(" bytes together")[0].rpartition(" ")[2])
            assert MAX_INFLIGHT_BYTES < nbytes <= MAX_INFLIGHT_BYTES + BLOCK_BYTES
            assert at_rest(served)
            for _ in range(6):
                assert await asyncio.to_thread(gone.acquire, timeout=PATIENCE)
        assert (await served.post(content=[image()], stream=stream)).status_code == 200

    with_server(processor, tmp_path, scenario)


def test_a_download_ends_where_others_have_the_room(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        slow = padded(SlowWeb())
        slow.go.set()
        with slow.running() as part:
            with served.context.admission.reserve(1):
                check_refusal(await served.post(content=[part] * 4), "--max-inflight-media-gb")
            assert (await served.post(content=[part] * 4)).status_code == 200

    with_server(processor, tmp_path, scenario)


def test_bytes_are_given_back_when_the_client_goes(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        slow = SlowWeb()
        with slow.running() as part:
            _, writer = await served.connect(content=[image(), part])
            await eventually(slow.asked.is_set)
            assert metric("inflight_media_bytes") > 0
            await hang_up(writer)
            await eventually(lambda: at_rest(served))

    with_server(processor, tmp_path, scenario)


def test_bytes_are_given_back_when_the_fetch_or_the_decode_fails(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        slow = SlowWeb()
        slow.go.set()
        for body, says in ((b"x" * (MAX_MEDIA_BYTES + 1), "--max-media-bytes"), (b"no image", "cannot be read")):
            slow.body = body
            with slow.running() as part:
                answer = await served.post(content=[part])
            assert answer.status_code == 400 and says in answer.json()["error"]["message"]
            assert at_rest(served)

    with_server(processor, tmp_path, scenario)


def test_media_that_are_too_much_at_any_time(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        (tmp_path / "allowed" / "large").write_bytes(b"x" * MAX_MEDIA_BYTES)
        part = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/allowed/large"}}
        answer = await served.post(content=[part] * 5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_too_large")
        assert "--max-inflight-media-gb" in answer.json()["error"]["message"]

    with_server(processor, tmp_path, scenario)


VIDEO_LIMITS = [
    field.name for field in dataclasses.fields(DecodeLimits) if field.name.startswith(("max_video", "max_frame"))
]


@pytest.mark.parametrize("limit", [{name: 0} for name in VIDEO_LIMITS], ids=str)
def test_each_limit_of_a_decode_is_named_by_its_flag(
    processor: MediaProcessor, tmp_path: Path, limit: dict[str, Any]
) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post(content=[image(), video()])
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_media")
        (name,) = limit
        message = response.json()["error"]["message"]
        assert message.startswith("video 1: ") and f"the limit of {flag_of(name)};" in message
        assert (await served.post(content=[image()])).status_code == 200  # the next one is not affected

    with_server(processor, tmp_path, scenario, media=media_loader(processor, limits=DecodeLimits(**limit)))


def test_the_limit_on_images_is_another(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post(content=[image(56), image(57)])
        assert response.status_code == 400
        assert "image 2: it has 3249 pixels (57x57), more than 3136, the limit of --max-image-pixels" in response.text
        assert (await served.post(content=[image(56)])).status_code == 200

    with_server(
        processor, tmp_path, scenario, media=media_loader(processor, limits=DecodeLimits(max_image_pixels=56 * 56))
    )


def test_decoded_frames_count_as_bytes_in_flight_until_they_are_processed(
    processor: MediaProcessor, tmp_path: Path
) -> None:
    gated = Gated(processor)

    async def scenario(served: Served) -> None:
        asking = asyncio.ensure_future(served.post(content=[image(200)]))
        await eventually(lambda: gated.inside == 1)
        assert metric("inflight_media_bytes") > 200 * 200 * 3
        gated.door.set()
        assert (await asking).status_code == 200
        await eventually(lambda: metric("inflight_media_bytes") == 0)

    with_server(processor, tmp_path, scenario, media=media_loader(gated))


def test_a_conversation_is_forgotten_once_the_engine_has_it(processor: MediaProcessor, tmp_path: Path) -> None:
    """As text its media are as large as they are themselves, and an answer may take long."""

    async def scenario(served: Served) -> None:
        gc.collect()  # what other tests have left in cycles
        served.core.hold = True
        for stream in (False, True):
            _, writer = await served.connect(content=[image()], stream=stream)
            await served.core.until(lambda: bool(served.core.running))
            await served.core.output(served.core.requests[-1], [65])
            await eventually(lambda: not any(type(one) is ChatRequest for one in gc.get_objects()))
            await hang_up(writer)
            await eventually(lambda: not served.context.engines.engines[0].requests)

    with_server(processor, tmp_path, scenario)
