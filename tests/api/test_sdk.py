"""The openai SDK as people use it: each feature through it, and every answer held to its models, strictly."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.model import Model
from pydantic import BaseModel

from mini_engine.media.processor import MediaProcessor
from tests.api.patience import PATIENCE
from tests.api.serving import MAX_REQUESTS, Served, chat_body, image, serve, words
from tests.api.test_media_settings import video
from tests.web import WebServer, response

OURS = {"metrics", "warnings"}


def check(kind: type[BaseModel], data: Any, ours: Collection[str] = ()) -> None:
    """`data` is a `kind`, of exactly the types that it says, without a field that it does not have but `ours`."""
    model = kind.model_validate(data, strict=True)
    unknown = [name for part in parts_of(model) for name in part.model_extra or {}]
    assert set(unknown) <= set(ours), unknown
    assert json.loads(model.model_dump_json(exclude_unset=True)) == data


def parts_of(value: Any) -> list[BaseModel]:
    if isinstance(value, list):
        return [part for one in value for part in parts_of(one)]
    if not isinstance(value, BaseModel):
        return []
    return [value, *(part for name in type(value).model_fields for part in parts_of(getattr(value, name)))]


def test_the_check_can_fail() -> None:
    chunk = {
        "id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}],
    }  # fmt: skip
    check(ChatCompletionChunk, chunk)
    for wrong in ({"created": "1"}, {"object": "chunk"}, {"mine": 1}, {"choices": [{"index": 0, "delta": {"x": 1}}]}):
        with pytest.raises((ValueError, AssertionError)):
            check(ChatCompletionChunk, chunk | wrong)


def with_server(processor: MediaProcessor, directory: Path, test: Callable[[Served], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with serve(processor, directory, words(processor, "a red", " circ", "le 🎈")) as served:
            await test(served)

    asyncio.run(scenario())


PLAIN: list[dict[str, Any]] = [
    {},
    {"n": 3, "logprobs": True, "top_logprobs": 2, "return_timings": True, "stop": ["circle"]},
    {"stream_options": {"include_usage": True}, "n": 2, "logprobs": True, "return_timings": True},
    {"stream_options": {"include_usage": False}, "stop": "red"},
]


def test_whole_answers_and_chunks_are_those_of_the_sdk(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for more in PLAIN:
            whole = {name: value for name, value in more.items() if name != "stream_options"}
            check(ChatCompletion, (await served.post(**whole)).json(), OURS)
            ours = {name: value for name, value in more.items() if name == "stream_options"}
            text = {"model": "tiny", "prompt": ["hello", "you"], "n": 2, "logprobs": 2 if len(more) > 2 else None}
            check(Completion, (await served.http.post("/v1/completions", json=text)).json())
            for path, kind, body in (
                ("chat/completions", ChatCompletionChunk, chat_body(stream=True, **more)),
                ("completions", Completion, {**text, **ours, "stream": True}),
            ):
                answer = await served.http.post(f"/v1/{path}", json=body)
                *events, done, end = answer.text.split("\n\n")
                assert (done, end) == ("data: [DONE]", "")
                for event in events:
                    assert event.startswith("data: ") and "\n" not in event
                    chunk = json.loads(event.removeprefix("data: "))
                    for choice in chunk["choices"] if kind is Completion else []:
                        # Null until the end, as OpenAI's own server has it; the model knows whole answers only.
                        choice["finish_reason"] = choice["finish_reason"] or "stop"
                    check(kind, chunk, OURS)
                assert len(events) >= body.get("n", 1)
        for model in (await served.http.get("/v1/models")).json()["data"]:
            check(Model, model, {"max_model_len", "root", "parent", "permission"})
            assert (await served.http.get(f"/v1/models/{model['id']}")).json() == model
        assert (await served.http.get("/v1/models/no/such")).json()["error"]["code"] == "model_not_found"

    with_server(processor, tmp_path, scenario)


def test_every_parameter_of_sampling_reaches_the_engine(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await served.ask(
            temperature=0.5, top_p=0.25, presence_penalty=1, frequency_penalty=-1, logit_bias={"7": 5}, seed=3,
            max_completion_tokens=9, logprobs=True, top_logprobs=4, user="me", metadata={"a": "b"}, store=False,
            service_tier="auto", parallel_tool_calls=True, response_format={"type": "text"}, tools=[], timeout=5,
            extra_body={"top_k": 8, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True,
                        "stop_token_ids": [70], "priority": 4, "cache_salt": "mine"},
        )  # fmt: skip
        (request,) = served.core.requests
        asked = request.sampling
        assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.seed) == (0.5, 0.25, 8, 0.125, 3)
        assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (1, -1, 1.5)
        assert (asked.logit_bias, asked.max_tokens, asked.min_tokens, asked.logprobs) == ({7: 5}, 9, 2, 4)
        assert (asked.stop_token_ids, request.priority, request.cache_salt) == ([70], 4, "mine")

    with_server(processor, tmp_path, scenario)


def test_a_conversation_goes_on_with_the_answer_as_it_came(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        create = served.openai.chat.completions.create
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "me"},
        ]
        reply = (await create(model="tiny", messages=messages)).choices[0].message
        for answer in (reply, reply.model_dump(), {"role": "assistant", "content": [{"type": "text", "text": "a"}]}):
            more = [*messages, answer, {"role": "user", "content": "and?"}]
            assert (await create(model="tiny", messages=more)).choices[0].message.content == reply.content

    with_server(processor, tmp_path, scenario)


def test_several_images_and_videos_in_each_way_that_they_are_written(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        one, clip = image()["image_url"]["url"], video()["video_url"]["url"]
        (tmp_path / "allowed" / "a.png").write_bytes(png := base64.b64decode(one.partition(",")[2]))
        content: list[dict[str, Any]] = [
            {"type": "text", "text": "which?"},
            {"type": "image_url", "image_url": {"url": one, "detail": "low"}, "uuid": "mine"},
            {"type": "video_url", "video_url": {"url": clip}, "uuid": "mine"},
            {"type": "image_url", "image_url": one},
            {"type": "image", "image": one},
            {"type": "image", "url": one},
            {"type": "video", "video": clip},
            {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/allowed/a.png"}},
        ]
        with WebServer(response(png)) as web:
            content.append({"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{web.port}/a.png"}})
            await served.ask(
                content,
                extra_body={
                    "media_io_kwargs": {"video": {"num_frames": 2}},
                    "mm_processor_kwargs": {"max_pixels": 56 * 56},
                    "return_timings": True,
                },
            )
        (request,) = served.core.requests
        assert [item.modality for item in request.media] == [
            "image", "video", "image", "image", "image", "video", "image", "image",
        ]  # fmt: skip
        images = {item.media_hash for item in request.media if item.modality == "image"}
        videos = {item.media_hash for item in request.media if item.modality == "video"}
        assert len(images) == len(videos) == 1, "the same bytes under whatever name and uuid"
        assert all(item.grid_thw[0] == 1 for item in request.media)

    with_server(processor, tmp_path, scenario)


def test_errors_are_the_sdks_exceptions(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        create = served.openai.chat.completions.create
        hello: list[Any] = [{"role": "user", "content": "hello"}]
        with pytest.raises(openai.NotFoundError) as caught:
            await create(model="gpt-5", messages=hello)
        assert (caught.value.code, caught.value.param, caught.value.type) == (
            "model_not_found", "model", "invalid_request_error",
        )  # fmt: skip
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await create(model="tiny", messages=hello, temperature=3, stream=stream)
            assert (refused.value.code, refused.value.param) == ("invalid_value", "temperature")
            assert refused.value.request_id.startswith("chatcmpl-")
        served.core.hold = True
        stream = await served.ask(stream=True)
        await anext(stream)
        await served.core.end(served.core.requests[-1], "error", "the media are lost")
        with pytest.raises(openai.APIError, match="the media are lost"):
            async for _ in stream:
                pass
        served.context.engines.engines[0].die()
        with pytest.raises(openai.InternalServerError) as stopped:
            await served.ask()
        assert (stopped.value.status_code, stopped.value.code) == (503, "engine_unavailable")

    with_server(processor, tmp_path, scenario)


def test_a_refusal_for_now_is_tried_again_by_the_sdk(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        waits: list[str] = []
        patient = served.openai.with_options(max_retries=2)
        places = [served.context.requests.admit() for _ in range(MAX_REQUESTS)]
        for place in places:
            place.__enter__()

        async def leave(answer: Any) -> None:
            if answer.status_code == 429:
                waits.append(answer.headers["retry-after"])
                while places:
                    places.pop().__exit__(None, None, None)

        patient._client.event_hooks["response"].append(leave)
        reply = await patient.chat.completions.create(model="tiny", messages=chat_body()["messages"])
        assert reply.choices[0].message.content and waits == ["1"]

    with_server(processor, tmp_path, scenario)


# As LangChain's ChatOpenAI and vLLM's `bench serve` write them.
OTHERS = [
    ("chat/completions", {
        "model": "tiny", "messages": [
            {"content": "hello", "role": "system"},
            {"content": [{"type": "text", "text": "what is it?"}, image()], "role": "user"},
        ],
        "temperature": 0.7, "n": 1, "stream": False, "stop": None, "max_completion_tokens": 20, "seed": None,
        "logprobs": None, "user": None,
    }),
    ("chat/completions", {
        "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, video()]}],
        "temperature": 0.0, "max_completion_tokens": 20, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }),
    ("completions", {
        "model": "tiny", "prompt": "hello", "repetition_penalty": 1.0, "max_tokens": 20, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True,
    }),
]  # fmt: skip


def test_bodies_of_other_clients(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for path, body in OTHERS:
            answer = await served.http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            assert '"usage":{' in answer.text

    with_server(processor, tmp_path, scenario)


def test_the_blocking_client(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        texts: list[str] = []

        def ask() -> None:
            url = f"http://127.0.0.1:{served.port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE) as client:
                messages: list[Any] = chat_body()["messages"]
                with client.chat.completions.create(model="tiny", messages=messages, stream=True) as stream:
                    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
                texts.append(client.completions.create(model="tiny", prompt="hello").choices[0].text)
                assert [model.id for model in client.models.list()] == ["tiny", "alias"]

        thread = threading.Thread(target=ask)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert texts == ["a red circle 🎈"] * 2

    with_server(processor, tmp_path, scenario)
