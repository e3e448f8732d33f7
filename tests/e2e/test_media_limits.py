"""What a request may say of its media, a video that is there only in part, and a server that has enough to do."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from mini_engine.demo import questions, videos
from tests.e2e.asked import ask_video, video_url
from tests.e2e.barriers import eventually
from tests.e2e.running_server import RunningServer, message
from tests.web import WebServer, response

ITEM_BYTES = 1 << 20  # --max-media-bytes, which is what is reserved for an item of unknown size


def ask(server: RunningServer, text: str, urls: list[tuple[str, str]], **more: Any) -> Any:
    return server.client.chat.completions.create(
        model=server.model, messages=[message(text, urls)], temperature=0, **more
    )


def cut_video() -> tuple[bytes, int]:
    """The first part of a video, and how long the whole is."""
    whole = videos.encode(videos.render(5 * 10**9), "mkv")
    return whole[: len(whole) * 7 // 10], len(whole)


def as_url(data: bytes) -> list[tuple[str, str]]:
    return [("video_url", "data:video/x-matroska;base64," + base64.b64encode(data).decode())]


def test_a_request_may_ask_for_fewer_frames(server):
    one = ask_video(7001, "describe")
    few = {"extra_body": {"media_io_kwargs": {"video": {"num_frames": 4}}}}
    decodes = server.total("media_decodes_total")
    tokens = []
    for more in ({}, few, {}, few):
        reply = ask(server, one.text, one.urls, **more)
        tokens.append(reply.usage.prompt_tokens)
        if not more:
            assert reply.choices[0].message.content == one.answer
    assert tokens[1] < tokens[0]
    assert tokens[2:] == tokens[:2]
    assert server.total("media_decodes_total") - decodes == 2  # each way once, and then from the cache


def test_a_video_that_is_there_in_part_is_refused(server):
    data, whole = cut_video()
    with pytest.raises(openai.BadRequestError, match=f"video 1: .* {len(data)} of at least {whole} bytes are there"):
        server.ask("Describe the video.", as_url(data))


@pytest.fixture(scope="module")
def clip() -> videos.Clip:
    return videos.render(6 * 10**9)


@pytest.fixture
def web(clip):
    """A web server that holds back its answer, a video, until it is told."""
    with held_back(videos.encode(clip)) as both:
        yield both


@contextlib.contextmanager
def held_back(data: bytes) -> Iterator[tuple[WebServer, threading.Event]]:
    go = threading.Event()

    def answer(connection: socket.socket, _: str) -> None:
        assert go.wait(600)
        connection.sendall(response(data))

    with WebServer(answer) as web:
        try:
            yield web, go
        finally:
            go.set()


@pytest.fixture(scope="module")
def strict():
    """A server with room for two requests, and for less than three items."""
    with RunningServer(
        "--allow-partial-video", "--allowed-media-domains", "127.0.0.1", "--max-media-bytes", str(ITEM_BYTES),
        "--max-inflight-media-gb", str(2.7 * ITEM_BYTES / 2**30), "--max-num-queued-reqs", "2",
        "--max-request-bytes", "8M", "--media-fetch-timeout", "600",
    ) as running:  # fmt: skip
        yield running


def test_a_part_of_a_video_is_answered_about_with_a_warning(strict):
    data, whole = cut_video()
    for _ in range(2):  # never from the cache, which could not warn
        reply = ask(strict, "Describe the video.", as_url(data))
        assert reply.choices[0].message.content
        (warning,) = reply.warnings
        assert warning.startswith(f"video 1: {len(data)} of at least {whole} bytes are there; ")
    *_, last = ask(strict, "Describe the video.", as_url(data), stream=True)
    assert last.warnings == [warning]
    reply = ask(strict, "Describe the video.", [("video_url", video_url(videos.render(5 * 10**9)))])
    assert "warnings" not in reply.model_extra


def test_a_server_that_has_enough_to_do_says_so(strict, clip, web):
    slow, go = web
    question = questions.ask([clip], "describe", 1)
    urls = [("video_url", f"http://127.0.0.1:{slow.port}/clip.mp4")]
    with ThreadPoolExecutor(2) as pool:
        try:
            replies = [pool.submit(ask, strict, question.text, urls) for _ in range(2)]
            eventually(lambda: wait_for_downloads(slow, 2))
            check_refusal(strict, "--max-num-queued-reqs", [])
        finally:
            go.set()
        for reply in replies:
            assert reply.result().choices[0].message.content == question.answer
    assert strict.metrics()['mini_engine:requests_rejected_total{reason="queued_requests"}'] == 1
    wait_for(strict, "inflight_media_bytes", 0)
    with pytest.raises(openai.BadRequestError, match="--max-inflight-media-gb"):
        strict.ask(question.text, as_url(b"x" * (800 << 10)) * 4)
    wait_for(strict, "inflight_media_bytes", 0)


def test_a_body_that_is_too_large(strict):
    with pytest.raises(openai.APIStatusError, match="--max-request-bytes") as caught:
        strict.ask("x" * (9 << 20), [])
    assert caught.value.status_code == 413


def check_refusal(server: RunningServer, flag: str, urls: list[tuple[str, str]]) -> None:
    with pytest.raises(openai.RateLimitError, match=flag) as caught:
        server.ask("What is it?", urls)
    assert int(caught.value.response.headers["retry-after"]) >= 1


def wait_for_downloads(web: WebServer, count: int) -> None:
    assert web.dialled == count


def wait_for(server: RunningServer, name: str, value: float) -> None:
    def check() -> None:
        assert server.total(name) == value, name

    eventually(check)
