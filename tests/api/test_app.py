"""The HTTP side as clients see it, with a scripted engine core behind it."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mini_engine.media.processor import MediaProcessor
from mini_engine.metrics import REGISTRY
from tests.api.peers import MemoryTransport, eventually
from tests.api.serving import MAX_MODEL_LEN, chat_body, hang_up, image, serve, words

ANSWER = ("a red", " circle", " moving left")


def metric(name: str, **labels: str) -> float:
    value = REGISTRY.get_sample_value(f"mini_engine:{name}", labels)
    assert value is not None, f"{name} {labels} is not there"
    return value


def test_a_completion(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            prompts, generated = metric("prompt_tokens_total"), metric("generation_tokens_total")
            ended = metric("request_success_total", finished_reason="length")
            answer = await served.ask()
            assert answer.choices[0].message.content == "".join(ANSWER)
            assert answer.choices[0].message.role == "assistant"
            assert answer.choices[0].finish_reason == "length"
            assert (answer.model, answer.object) == ("tiny", "chat.completion")
            (request,) = served.core.requests
            assert answer.id == request.request_id
            assert request.request_id.startswith("chatcmpl-")
            delivered = sum(map(len, served.core.script(request)))
            assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
            assert answer.usage.completion_tokens == delivered
            assert answer.usage.total_tokens == len(request.prompt_token_ids) + delivered
            assert request.media == []
            assert served.transports[0].sent == []
            assert metric("prompt_tokens_total") - prompts == len(request.prompt_token_ids)
            assert metric("generation_tokens_total") - generated == delivered
            assert metric("request_success_total", finished_reason="length") - ended == 1

    asyncio.run(scenario())


def test_a_stream(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            stream = await served.ask(stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            *body, used = chunks
            assert body[0].choices[0].delta.role == "assistant"
            assert all(chunk.choices[0].delta.role is None for chunk in body[1:])
            assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == "".join(ANSWER)
            assert [chunk.choices[0].finish_reason for chunk in body] == [None] * (len(body) - 1) + ["length"]
            assert all(chunk.usage is None for chunk in body)
            assert used.choices == []
            assert used.usage.prompt_tokens == len(served.core.requests[0].prompt_token_ids)

            response = await served.post(stream=True)
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-request-id"] == served.core.requests[1].request_id
            assert response.text.endswith("data: [DONE]\n\n")
            assert "usage" not in response.text

    asyncio.run(scenario())


def test_nothing_leaves_before_the_first_token(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, lambda request: []) as served:
            served.core.hold = True
            reader, writer = await served.connect(stream=True)
            await served.core.until(lambda: bool(served.core.requests))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.05)
            (request,) = served.core.requests
            await served.core.output(request, served.core.script(request) or [65])
            assert b'"role":"assistant"' in await reader.readuntil(b"\n\n\r\n")
            await hang_up(writer)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_request(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red", " circ", "le moving", " left")) as served:
            served.core.hold = True
            answer = await served.ask(stop=["circle"], stream=stream)
            if stream:
                chunks = [chunk async for chunk in answer]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                reason = chunks[-1].choices[0].finish_reason
            else:
                text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert (text, reason) == ("a red ", "stop")
            await served.core.until(lambda: bool(served.core.finishes))
            assert [finish.reason for finish in served.core.finishes] == ["stop"]
            await eventually(lambda: not served.context.engines.engines[0].requests)
            if not stream:
                delivered = processor.hf_processor.tokenizer.decode(
                    sum(served.core.script(served.core.requests[0]), [])[: answer.usage.completion_tokens]
                )
                assert delivered.startswith("a red circle")
                assert len(delivered) < len("a red circle moving left")

    asyncio.run(scenario())


def test_an_image_goes_past_the_core(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            before = metric("ipc_messages_total", transport="torch_shm")
            moved = metric("ipc_bytes_total", transport="torch_shm")
            decodes = metric("media_decodes_total")
            await served.ask([image(56), {"type": "text", "text": "what?"}, image(112)])
            (request,) = served.core.requests
            for item in request.media:
                stretch = request.prompt_token_ids[item.offset : item.offset + item.num_tokens]
                assert stretch == [processor.hf_processor.image_token_id] * item.num_tokens
            assert [item.grid_thw for item in request.media] == [(1, 4, 4), (1, 8, 8)]
            assert [item.patches.message for item in request.media] == served.transports[0].sent
            assert metric("ipc_messages_total", transport="torch_shm") - before == 2 * 2
            nbytes = sum(item.patches.shape[0] * item.patches.shape[1] for item in request.media)
            assert metric("ipc_bytes_total", transport="torch_shm") - moved == 2 * nbytes
            assert metric("media_decodes_total") - decodes == 2
            await eventually(lambda: not served.transports[0].held)
            assert metric("ipc_buffered_bytes") == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("stage", ["reserve", "copy"])
def test_tensors_that_cannot_be_sent_are_a_503(processor: MediaProcessor, tmp_path: Path, stage: str) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            (transport,) = served.transports
            transport.fail_at = stage
            with pytest.raises(openai.InternalServerError, match="could not be handed"):
                await served.ask([image()])
            assert not served.context.engines.engines[0].requests and not transport.held
            transport.fail_at = None
            assert (await served.ask([image()])).choices[0].message.content == "".join(ANSWER)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            served.core.hold = True
            aborted = metric("request_success_total", finished_reason="abort")
            reader, writer = await served.connect(stream=stream)
            await served.core.until(lambda: bool(served.core.requests))
            if stream:
                await reader.readuntil(b"\n\n\r\n")
            await hang_up(writer)
            await served.core.until(lambda: bool(served.core.finishes))
            (finish,) = served.core.finishes
            assert (finish.request_id, finish.reason) == (served.core.requests[0].request_id, "abort")
            await eventually(lambda: not served.context.engines.engines[0].requests)
            assert metric("request_success_total", finished_reason="abort") - aborted == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_line_for_decoding(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            admission = served.context.admission
            async with admission.places(admission.limit):
                _, writer = await served.connect(content=[image()], stream=stream)
                await eventually(lambda: admission.num_waiting == 1)
                await hang_up(writer)
                await eventually(lambda: admission.num_waiting == 0)
            assert (await served.ask()).choices[0].message.content == "".join(ANSWER)
            assert len(served.core.requests) == 1

    asyncio.run(scenario())


def test_a_client_that_leaves_while_its_tensors_wait_for_room(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        shm = MemoryTransport(room=1)
        async with serve(processor, tmp_path, words(processor), transports=[shm]) as served:
            served.core.hold = True
            _, first = await served.connect(content=[image()])
            await served.core.until(lambda: len(served.core.requests) == 1)
            _, second = await served.connect(content=[image()])
            engine = served.context.engines.engines[0]
            await eventually(lambda: len(engine.requests) == 2)
            await hang_up(second)
            await eventually(lambda: len(engine.requests) == 1)
            assert served.context.admission.num_admitted == 0
            await hang_up(first)
            await eventually(lambda: not shm.held and not engine.requests)
            assert len(served.core.requests) == 1

    asyncio.run(scenario())


def test_the_death_of_the_engine_ends_all_requests(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        shm = MemoryTransport(room=1)
        async with serve(processor, tmp_path, words(processor, "a red"), transports=[shm]) as served:
            served.core.hold = True
            assert (await served.http.get("/health")).status_code == 200
            asking = [asyncio.create_task(served.post(content=[image()])) for _ in range(2)]  # one waits for room
            stream = await served.ask(stream=True)
            first = await anext(stream)
            assert first.choices[0].delta.content
            engine = served.context.engines.engines[0]
            await eventually(lambda: len(engine.requests) == 3 and len(served.core.requests) == 2)
            served.context.engines.peer_gone("api 1")
            assert served.context.engines.alive
            served.context.engines.peer_gone("worker 0.0")
            first, second = await asyncio.gather(*asking)
            assert {first.status_code, second.status_code} == {500, 503}  # the engine had one of them
            for response in (first, second):
                assert response.json()["error"]["code"] == "engine_unavailable"
                assert ("retry-after" in response.headers) == (response.status_code == 503)
            with pytest.raises(openai.APIError, match="has stopped"):
                async for _ in stream:
                    pass
            assert (await served.http.get("/health")).status_code == 503
            refused = await served.post(content=[image()])
            assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
            assert shm.closed

    asyncio.run(scenario())


def test_an_error_of_the_engine(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, lambda request: []) as served:
            served.core.hold = True
            asking = asyncio.create_task(served.post())
            await served.core.until(lambda: bool(served.core.requests))
            await served.core.end(served.core.requests[0], "error", "the media are lost")
            response = await asking
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "the media are lost"

            reader, writer = await served.connect(stream=True)
            await served.core.until(lambda: len(served.core.requests) == 2)
            request = served.core.requests[1]
            await served.core.output(request, [65])
            await reader.readuntil(b"\n\n\r\n")
            await served.core.end(request, "error", "the media are lost")
            rest = await reader.readuntil(b"0\r\n\r\n")
            assert b'data: {"error":{"message":"the media are lost","type":"server_error"' in rest
            assert b"[DONE]" not in rest
            await hang_up(writer)

    asyncio.run(scenario())


BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OUTSIDE = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}


CLIENT_ERRORS: list[tuple[Any, dict[str, Any], int, str]] = [
    ("hello", {"model": "other"}, 404, "does not exist"),
    ("hello", {"frobnicate": 1}, 400, "frobnicate"),
    ([BROKEN], {}, 400, "image 1"),
    ([OUTSIDE], {}, 400, "no such regular file"),
    ([image(), image(), image()], {}, 400, "more than the 2"),
    ("word " * 700, {}, 400, f"{MAX_MODEL_LEN}"),
    ("hello", {"max_tokens": MAX_MODEL_LEN}, 400, "Ask for at most"),
    ("a <|image_pad|>", {}, 400, "<|image_pad|>"),
    ([{"type": "sound"}], {}, 400, "sound"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_client(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER), limits={"image": 2}) as served:
            for content, more, status, says in CLIENT_ERRORS:
                response = await served.post(content=content, stream=stream, **more)
                assert response.status_code == status, response.text
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == "invalid_request_error"
                assert says in error["message"]
                assert str(tmp_path) not in response.text
                assert "/etc" not in response.text
            assert served.core.requests == []
            assert served.context.admission.num_admitted == 0
            assert (await served.ask([image()])).choices[0].message.content == "".join(ANSWER)

    asyncio.run(scenario())


def test_an_unexpected_error_is_logged_and_not_told(
    processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> httpx.Response:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            del served.context.renderer._encoder
            return await served.post()

    response = asyncio.run(scenario())
    assert response.status_code == 500
    request_id = response.headers["x-request-id"]
    assert request_id in response.json()["error"]["message"]
    assert "_encoder" not in response.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert request_id in record.message
    assert record.exc_info is not None


def test_the_other_endpoints(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            models = [model async for model in served.openai.models.list()]
            assert [model.id for model in models] == ["tiny", "alias"]
            other = (await served.http.get("/v1/models/other")).json()["error"]["message"]
            assert other == "The model 'other' does not exist; this server has tiny, alias."
            assert (await served.http.get("/version")).json()["version"]
            figures = await served.http.get("/metrics")
            assert 'mini_engine:ipc_messages_total{transport="direct_rpc"}' in figures.text
            assert figures.headers["content-type"].startswith("text/plain")
            for request in (served.http.get("/nowhere"), served.http.get("/v1/chat/completions")):
                response = await request
                assert response.status_code in (404, 405)
                assert response.json()["error"]["type"] == "invalid_request_error"
            for path in ("/v1/responses", "/v1/embeddings", "/v1/audio/speech"):
                unknown = (await served.http.post(path, json={})).json()["error"]
                assert unknown["code"] == "unknown_url" and f"POST {path}; /openapi.json" in unknown["message"]
            slash = await served.http.get("/live/", headers={"host": "elsewhere"})
            assert (slash.status_code, slash.json()["error"]["code"]) == (404, "unknown_url")
            for path, allowed in (
                ("/v1/chat/completions", "POST"),
                ("/health", "GET, HEAD"),
                ("/v1/models/M", "GET"),
                ("/docs", "GET, HEAD"),
            ):
                response = await served.http.put(path)
                assert response.status_code == 405 and response.headers["allow"] in allowed
                assert response.json()["error"]["message"].startswith(f"Method Not Allowed: PUT {path}; ")
            schema = (await served.http.get("/openapi.json")).json()
            assert "/v1/chat/completions" in schema["paths"]
            half, headers = json.dumps(chat_body())[:-1], {"content-type": "application/json"}
            bad = await served.http.post("/v1/chat/completions", content=half, headers=headers)
            assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_json")

    asyncio.run(scenario())
