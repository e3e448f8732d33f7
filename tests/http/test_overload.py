"""What is too much for the server at present: it says so at once, before it downloads, and keeps nothing of it."""

import asyncio
import json
import threading

import httpx
import pytest

from mini_engine import fair_semaphore
from mini_engine.fair_semaphore import FairSemaphore
from mini_engine.http.context import TEXT_THREADS
from mini_engine.prompt.renderer import Prompt
from mini_engine.protocol.bodies import ChatRequest
from mini_engine.transport.arena import Arena
from mini_engine.transport.page_allocator import PAGE_BYTES
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.support.patience import PATIENCE, cancelled, eventually
from tests.support.peers import make_queue
from tests.support.serving import (
    CHAT_HEAD,
    MAX_INFLIGHT_BYTES,
    MAX_MEDIA_BYTES,
    MAX_REQUEST_BYTES,
    MAX_REQUESTS,
    Counted,
    Serve,
    Served,
    SlowWeb,
    chat_body,
    check_error,
    image,
    metric,
)
from tests.support.tensor_queue import ME


def check_refusal(refusal: httpx.Response, flag: str) -> None:
    check_error(refusal, 429, "overloaded", flag)
    assert refusal.headers["retry-after"] == "1"
    assert refusal.headers["x-request-id"].startswith("chatcmpl-")
    assert refusal.json()["error"]["type"] == "rate_limit_error"


@pytest.fixture
def large(web: SlowWeb) -> SlowWeb:
    """Its image has as many bytes as one may."""
    web.body += bytes(MAX_MEDIA_BYTES - len(web.body))
    web.go.set()
    return web


@pytest.mark.parametrize("stream", [False, True])
async def test_unfinished_requests_are_limited_before_the_body_is_read(served: Served, stream: bool) -> None:
    counted = Counted("requests_rejected_total{reason=queued_requests}")
    served.core.hold = True
    writers = [(await served.connect_chat(stream=stream))[1] for _ in range(MAX_REQUESTS)]
    await served.core.has_requests(MAX_REQUESTS)
    check_refusal(await served.post(stream=stream), "--max-num-queued-reqs")
    for head in (CHAT_HEAD, CHAT_HEAD.replace(b"chat/completions", b"completions")):
        reader, _ = await served.connect(head + b"content-length: 1000\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        assert b" 429 " in answer and b"retry-after: 1" in answer
    assert counted.since() == [3]
    assert (await served.http.post("/tokenize", json={"prompt": "x"})).status_code == 200
    writers[0].close()
    await eventually(lambda: served.context.requests.used == MAX_REQUESTS - 1)
    served.core.hold = False
    assert (await served.post(stream=stream)).status_code == 200


async def test_every_choice_of_every_prompt_counts_as_a_request(served: Served) -> None:
    refusal = await served.post(n=MAX_REQUESTS + 1)
    check_error(refusal, 400, "invalid_value", f"{MAX_REQUESTS} of --max-num-queued-reqs; lower 'n'")
    served.core.hold = True
    body = {"prompt": ["a", "b"], "n": MAX_REQUESTS // 2 - 1}
    asking = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await served.core.has_requests(2)
    check_refusal(await served.post(n=3), "--max-num-queued-reqs")
    assert served.context.requests.used == MAX_REQUESTS - 2
    await cancelled(asking)
    await eventually(lambda: not served.context.requests.used)


async def test_bodies_that_are_received_at_once_share_their_room(served: Served) -> None:
    """What has come of them counts, not what they declare."""
    counted = Counted("requests_rejected_total{reason=inflight_bodies}")
    room = served.context.bodies
    part = CHAT_HEAD + b"content-length: %d\r\n\r\n" % MAX_REQUEST_BYTES + b" " * (MAX_REQUEST_BYTES * 2 // 5)
    for count in (1, 2):
        await served.connect(part)
        await eventually(lambda count=count: room.used == count * (MAX_REQUEST_BYTES * 2 // 5))
    reader, _ = await served.connect(part)
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE)
    assert b" 429 " in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
    assert counted.since() == [1]
    assert (await served.post()).status_code == 200  # a small one finds room


@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_are_in_flight_until_the_request_is_sent(served: Served, large: SlowWeb, stream: bool) -> None:
    counted = Counted("requests_rejected_total{reason=inflight_media}")
    served.gate.door.clear()
    first = served.asking([large.part] * 4, stream=stream)
    await eventually(lambda: served.gate.inside == 1)
    assert served.context.media_permits.num_free == 0
    assert metric("inflight_media_bytes") > 4 * MAX_MEDIA_BYTES == MAX_INFLIGHT_BYTES, "with the decoded frames"
    for part in (large.part, image()):
        check_refusal(await served.post([part], stream=stream), "--max-inflight-media-gb")
    assert counted.since() == [2]
    served.core.hold = True
    served.gate.door.set()
    request = await served.core.has_requests()
    await eventually(lambda: not metric("inflight_media_bytes") and served.context.media_permits.num_free == 4)
    assert not first.done()
    await served.core.end(request, "length")
    assert (await first).status_code == 200
    served.core.hold = False
    assert (await served.post([image()], stream=stream)).status_code == 200


async def test_a_download_ends_where_others_have_the_room(served: Served, large: SlowWeb) -> None:
    """One that finds no room in an idle server is a 400."""
    refusal = await served.post([large.part] * 6)
    check_error(refusal, 400, "media_too_large", f"more than the {MAX_INFLIGHT_BYTES} of --max-inflight-media-gb")
    with served.context.media_bytes.reserve(1):
        check_refusal(await served.post([large.part] * 4), "--max-inflight-media-gb")
    assert (await served.post([large.part] * 4)).status_code == 200


async def test_web_server_that_hangs_delays_no_other_request(served: Served, web: SlowWeb) -> None:
    """With more of its items than permits and threads that decode."""
    hanging = [served.asking([web.part, web.part]) for _ in range(MAX_REQUESTS - 1)]
    await eventually(lambda: web.dialled == 2 * len(hanging))
    for side in (56, 84):
        assert (await served.post([image(side)])).status_code == 200
    web.go.set()
    assert {(await task).status_code for task in hanging} == {200}


async def test_downloads_do_not_wait_for_all_queued_downloads_of_another_client(
    serve: Serve, web: SlowWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that run, and one more."""
    monkeypatch.setattr(fair_semaphore, "SLOW_SECONDS", PATIENCE)
    async with serve(api_key=["first", "second"]) as served:
        monkeypatch.setattr(served.context.media_loader, "_downloads", downloads := FairSemaphore(2, slow_limit=2))

        def ask(key: str) -> asyncio.Task[httpx.Response]:
            part = {"type": "image_url", "image_url": f"http://127.0.0.1:{web.port}/{key}.png"}
            body, headers = chat_body([part]), {"authorization": f"Bearer {key}"}
            return asyncio.create_task(served.http.post("/v1/chat/completions", json=body, headers=headers))

        asking = [ask("first") for _ in range(4)]
        await eventually(lambda: len(web.requests) == 2 and len(downloads._queue) == 2)
        asking.append(ask("second"))
        await eventually(lambda: len(downloads._queue) == 3)
        web.go.set()
        assert {(await task).status_code for task in asking} == {200}
        assert [number for number, head in enumerate(web.requests) if "second.png" in head] in ([2], [3])


async def test_large_request_is_not_overtaken_in_the_queue_for_decoding(served: Served) -> None:
    """There are four permits. More items than permits run alone."""
    permits, turns = served.context.media_permits, served.context.media_permits.turns
    served.gate.door.clear()
    asking = []
    for waiting, sides in enumerate([(56, 57, 58), range(59, 64), (64,), (65, 66)]):
        asking.append(served.asking([image(side) for side in sides]))
        await eventually(lambda n=waiting: permits.num_free <= 1 and (not turns.num_free) + len(turns._queue) == n)
    assert (await served.post()).status_code == 200  # needs no permit
    await cancelled(asking.pop())
    served.gate.door.set()
    assert {(await task).status_code for task in asking} == {200}
    assert [len(request.media) for request in served.core.requests] == [0, 3, 5, 1]


async def test_media_do_not_wait_for_all_queued_media_of_another_client(serve: Serve) -> None:
    """But for those that are next, and of one more request. There are four permits."""
    async with serve(api_key=["first", "second"]) as served:
        permits, turns, sides = served.context.media_permits, served.context.media_permits.turns, iter(range(56, 100))
        served.gate.door.clear()

        def ask(num_items: int, key: str) -> asyncio.Task[httpx.Response]:
            content = [image(next(sides)) for _ in range(num_items)]
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.create_task(
                served.http.post("/v1/chat/completions", json=chat_body(content), headers=headers)
            )

        asking = []
        for waiting in range(4):
            asking.append(ask(4, "first"))
            await eventually(lambda n=waiting: not permits.num_free and (not turns.num_free) + len(turns._queue) == n)
        asking.append(ask(1, "second"))
        await eventually(lambda: len(turns._queue) == 3)
        served.gate.door.set()
        assert {(await task).status_code for task in asking} == {200}
        assert [len(request.media) for request in served.core.requests] == [4, 4, 4, 1, 4]


async def test_tensors_that_do_not_fit_into_memory_are_refused(serve: Serve) -> None:
    async with serve(queue=make_queue(PAGE_BYTES)) as served:
        response = await served.post([image(84), image(112)])
        check_error(response, 400, "media_too_large", "--mm-ipc-memory-bytes")
        assert not served.core.requests
    async with serve(queue=TensorIpcSender(ME, [], Arena(PAGE_BYTES, lambda: 0))) as served:
        response = await served.post([image()])
        check_error(response, 503, "engine_unavailable")
        assert "retry-after" in response.headers and not served.core.requests


async def test_large_texts_take_few_threads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop waits for each that has the interpreter. Other work has threads of its own."""
    renderer, door, inside = served.context.renderer, threading.Event(), list[ChatRequest]()
    render = renderer.render

    def render_held(chat: ChatRequest) -> Prompt:
        if chat.num_characters > 1000:
            inside.append(chat)
            assert door.wait(PATIENCE)
        return render(chat)

    monkeypatch.setattr(renderer, "render", render_held)
    large = {"type": "text", "text": "a" * 5000}
    asking = [served.asking([large]) for _ in range(MAX_REQUESTS - 1)]
    await eventually(lambda: served.context.requests.used == len(asking) and len(inside) == TEXT_THREADS)
    await asyncio.to_thread(lambda: None)
    assert (await served.post()).status_code == 200 and len(inside) == TEXT_THREADS
    door.set()
    assert {(await task).status_code for task in asking} == {400} and len(inside) == len(asking)  # they are too long


async def test_text_does_not_wait_for_all_queued_texts_of_another_client(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one of them. A text whose client has disconnected keeps its thread."""
    async with serve(api_key=["first", "second"]) as served:
        renderer, door, begun = served.context.renderer, threading.Event(), list[str]()

        def encode_held(text: str, add_special_tokens: bool) -> list[int]:
            begun.append(text[0])
            assert door.wait(PATIENCE)
            return [len(text), int(add_special_tokens)]

        def ask(text: str, key: str) -> asyncio.Task[httpx.Response]:
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.create_task(served.http.post("/tokenize", json={"prompt": text * 5000}, headers=headers))

        monkeypatch.setattr(renderer, "encode", encode_held)
        permits = served.context.text_permits
        asking = [ask("a", "first") for _ in range(TEXT_THREADS + 4)]
        await eventually(lambda: len(begun) == TEXT_THREADS and len(permits._queue) == 4)
        asking.append(ask("b", "second"))
        await eventually(lambda: len(permits._queue) == 5)
        await cancelled(asking.pop(0))
        await asyncio.to_thread(lambda: None)
        assert not permits.num_free and len(begun) == TEXT_THREADS
        door.set()
        assert {(await task).status_code for task in asking} == {200}
        assert "".join(begun) == "a" * TEXT_THREADS + "abaaa" and permits.num_free == TEXT_THREADS
