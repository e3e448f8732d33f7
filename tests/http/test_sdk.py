"""The openai SDK as people use it: its features, and every answer is checked strictly against its models."""

import json
from collections.abc import Collection
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.model import Model
from pydantic import BaseModel

from tests.support.serving import Served, events_of

OURS = {"image_tokens", "metrics", "video_tokens", "warnings"}  # `image_tokens`: of older releases of the SDK


def check(kind: type[BaseModel], data: Any, ours: Collection[str] = ()) -> None:
    """`data` is a `kind`, of exactly the types that it says, without a field that it does not have but `ours`."""
    model = kind.model_validate(data, strict=True)
    unknown = [name for part in parts_of(model) for name in part.model_extra or {}]
    assert set(unknown) <= set(ours), unknown
    assert json.loads(model.model_dump_json(exclude_unset=True)) == data


def parts_of(value: Any) -> list[BaseModel]:
    if isinstance(value, list):
        return [part for item in value for part in parts_of(item)]
    if not isinstance(value, BaseModel):
        return []
    return [value, *(part for name in type(value).model_fields for part in parts_of(getattr(value, name)))]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "logprobs": True, "top_logprobs": 2, "return_timings": True, "stop": ["circle"]},
        {"stream_options": {"include_usage": True}, "n": 2, "logprobs": True, "return_timings": True},
        # As LangChain's ChatOpenAI writes it.
        {"temperature": 0.7, "n": 1, "stop": None, "max_completion_tokens": 20, "seed": None, "logprobs": None},
    ],
)
async def test_whole_answers_and_chunks_are_those_of_the_sdk(served: Served, fields: dict[str, Any]) -> None:
    count = fields.get("n", 1)
    stream_options = {name: value for name, value in fields.items() if name == "stream_options"}
    whole = {name: value for name, value in fields.items() if name not in stream_options}
    check(ChatCompletion, (await served.post(**whole)).json(), OURS)
    response = await served.post(stream=True, **fields)
    chunks = events_of(response)
    assert len(chunks) >= count and {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}
    for chunk in chunks:
        check(ChatCompletionChunk, chunk, OURS)
    text = {"prompt": ["hello", "you"], "n": count, "logprobs": 2 if count > 1 else None}
    check(Completion, (await served.http.post("/v1/completions", json=text)).json(), OURS)
    for chunk in events_of(await served.http.post("/v1/completions", json={**text, **stream_options, "stream": True})):
        for choice in chunk["choices"]:
            # Null until the end, as OpenAI's own server has it; the model knows whole answers only.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(Completion, chunk, OURS)


async def test_usage_in_every_chunk(served: Served) -> None:
    """Of all choices so far: as many tokens as are listed."""
    asked = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    options: dict[str, Any] = {"n": 2, "stream": True, "stream_options": dict.fromkeys(asked, True)}
    for is_chat in (True, False):
        asking = served.ask(logprobs=True, **options) if is_chat else served.complete(["a", "b"], logprobs=0, **options)
        count, chunks = 0, [chunk async for chunk in await asking]
        prompt_tokens = chunks[-1].usage.prompt_tokens
        for chunk in chunks:
            listed = [choice.logprobs for choice in chunk.choices]
            count += sum(len(each.content if is_chat else each.tokens) for each in listed)
            used = chunk.usage
            expected = (prompt_tokens, count, prompt_tokens + count)
            assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == expected
        assert not chunks[-1].choices and count


async def test_models_are_listed_and_retrieved_by_name(served: Served) -> None:
    for model in (await served.http.get("/v1/models")).json()["data"]:
        check(Model, model, {"max_model_len"})
        assert (await served.http.get(f"/v1/models/{model['id']}")).json() == model
    assert [model.id async for model in served.openai.models.list()] == ["tiny", "alias"]
    with pytest.raises(openai.NotFoundError, match="The model 'no/such' does not exist; this server has tiny, alias"):
        await served.openai.models.retrieve("no/such")


async def test_every_parameter_of_sampling_reaches_the_engine(served: Served) -> None:
    await served.ask(
        temperature=0.5, top_p=0.25, presence_penalty=1, frequency_penalty=-1, logit_bias={"7": 5}, seed=3,
        max_completion_tokens=9, logprobs=True, top_logprobs=4, user="me", metadata={"a": "b"}, store=False,
        service_tier="auto", parallel_tool_calls=True, response_format={"type": "text"}, tools=[], timeout=5,
        extra_body={"top_k": 8, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True,
                    "stop_token_ids": [70], "priority": 4, "cache_salt": "mine"},
    )  # fmt: skip
    (request,) = served.core.requests
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.25, 8, 0.125, 3)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert (params.logit_bias, params.max_tokens, params.min_tokens, params.logprobs) == ({7: 5}, 9, 2, 4)
    assert (params.stop_token_ids, request.priority, request.cache_salt) == ([70], 4, "mine")


async def test_conversation_goes_on_with_the_answer_as_it_came(served: Served) -> None:
    create = served.openai.chat.completions.create
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "me"},
    ]
    reply = (await create(model="tiny", messages=messages)).choices[0].message
    for answer in (reply, reply.model_dump(), {"role": "assistant", "content": [{"type": "text", "text": "a"}]}):
        more = [*messages, answer, {"role": "user", "content": "and?"}]
        assert (await create(model="tiny", messages=more)).choices[0].message.content == reply.content
