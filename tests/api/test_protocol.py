"""Request bodies: what is accepted, and what the error says of what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mini_engine.api.body import decode_body
from mini_engine.api.errors import ApiError
from mini_engine.api.protocol import MAX_MESSAGES, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MESSAGES = [{"role": "user", "content": "hello"}]


def parse(**fields: Any) -> ChatRequest:
    return decode_body(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), ChatRequest, ["m"])


def complete(**fields: Any) -> CompletionRequest:
    return decode_body(json.dumps(fields).encode(), CompletionRequest, ["m"])


def error_of(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    return caught.value


def test_all_supported_fields() -> None:
    request = parse(
        max_tokens=5, temperature=0, top_p=1, top_k=-1, repetition_penalty=1.1, seed=-7, stop=["a", "b"],
        stop_token_ids=[3], ignore_eos=True, stream=True, stream_options={"include_usage": True}, min_p=0.5, n=128,
        presence_penalty=-2, frequency_penalty=2, logit_bias={"0": -100, "17": 100}, logprobs=True, top_logprobs=20,
        include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=5, priority=-1, cache_salt="mine",
        media_io_kwargs={"video": {"fps": 1.5, "max_frames": None}, "image": {}},
        mm_processor_kwargs={"size": {"longest_edge": 50176}, "cap_pixels_per_frame": True},
    )  # fmt: skip
    assert request.logit_bias == {0: -100, 17: 100}
    assert (request.num_choices, parse().num_choices) == (128, 1)
    assert (request.stop_strings, request.num_logprobs, request.temperature) == (["a", "b"], 20, 0)
    assert request.media_io_kwargs == {"video": {"fps": 1.5, "max_frames": None}, "image": {}}
    assert request.mm_processor_kwargs == {"size": {"longest_edge": 50176}, "cap_pixels_per_frame": True}
    assert request.include_usage


def test_null_is_absent() -> None:
    assert parse(**dict.fromkeys(set(ChatRequest.__struct_fields__) - {"model", "messages"})) == parse()


def test_ignored_and_neutral_fields_change_nothing() -> None:
    parse(user="me", metadata={"a": "b"}, store=True, service_tier="auto")
    parse(tools=[], tool_choice="auto", response_format={"type": "text"}, echo=False)
    message = {"role": "user", "name": "x", "content": [{"type": "text", "text": "x", "uuid": "1"}]}
    parse(messages=[message, {"role": "assistant", "content": "y", "refusal": None, "tool_calls": []}])


def test_media_parts_have_a_url() -> None:
    content = [
        {"type": "image_url", "image_url": {"url": "a", "detail": "low"}},
        {"type": "video_url", "video_url": "c", "uuid": "1"},
    ]
    parts: Any = parse(messages=[{"role": "user", "content": content}]).messages[0].content
    assert [(part.modality, part.url) for part in parts] == [("image", "a"), ("video", "c")]


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 2.5}, "temperature", "<= 2.0"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"top_k": 1.5}, "top_k", "got `float`"),
        ({"max_tokens": True}, "max_tokens", "got `bool`"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "not both"),
        ({"n": 129}, "n", "<= 128"),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed when 'logprobs' is true"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "<= 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "expected `int`"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "1024"),
        ({"seed": 2**63}, "seed", "9223372036854775807"),
        ({"stop": ["a", ""]}, "stop[1]", "length >= 1"),
        ({"stop_token_ids": [0, -1]}, "stop_token_ids[1]", ">= 0"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": MESSAGES * (MAX_MESSAGES + 1)}, "messages", str(MAX_MESSAGES)),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing required parameter"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "got `null`"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "Unknown parameter"),
        (user({"type": "input_audio"}), "messages[0].content[0].type", "'input_audio'"),
        (user({"text": "x"}), "messages[0].content[0].type", "Missing required parameter"),
        (user({"type": "text", "text": "x", "image": "y"}), "messages[0].content[0].image", "Unknown parameter"),
        (user({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url", "Missing"),
        (user({"type": "image_url", "image_url": ""}), "messages[0].content[0].image_url", "length >= 1"),
        (user({"type": "image_url", "image_url": "x", "fps": 1}), "messages[0].content[0].fps", "Unknown parameter"),
        (user({"type": "video", "video": "x"}), "messages[0].content[0].type", "'video'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unknown parameter"),
        ({"media_io_kwargs": {"audio": {}}}, "media_io_kwargs", "'audio'"),
        ({"tools": [{}]}, "tools", "not supported by this server; leave it out or send []"),
        ({"echo": 0}, "echo", "send false"),
        ({"frobnicate": 1}, "frobnicate", "Unknown parameter: 'frobnicate'"),
    ],
)
def test_errors_name_the_field_and_what_it_may_hold(fields: dict[str, Any], param: str, says: str) -> None:
    error = error_of(**fields)
    assert (error.status, error.body.type, error.body.param) == (400, "invalid_request_error", param)
    assert says in error.body.message and len(error.body.message) < 400


def test_unknown_model() -> None:
    error = error_of(model="gpt-7")
    assert (error.status, error.body.code, error.body.param) == (404, "model_not_found", "model")
    assert parse(model=None).model is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"a": NaN}',
        b'{"stop": ' + b"[" * 100_000,
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
    ],
)
def test_what_is_not_json(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(body, ChatRequest, ["m"])
    assert (caught.value.status, caught.value.body.type) == (400, "invalid_request_error")


def test_prompts_of_a_completion() -> None:
    for prompt, prompts in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])):
        assert complete(prompt=prompt).prompts == prompts
    for fields, says in (
        ({"prompt": []}, "length >= 1"),
        ({"prompt": [[]]}, "length >= 1"),
        ({"prompt": ["a", 1]}, "cannot be mixed"),
        ({"prompt": ["a"] * 65, "n": 2}, "65 prompts with 2 choices each are more than 128"),
        ({"prompt": "a", "return_timings": True}, "not supported"),
    ):
        with pytest.raises(ApiError, match=says):
            complete(**fields)


@pytest.mark.parametrize("body", [b"{}", b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}'])
def test_a_tokenize_request_has_a_prompt_or_messages(body: bytes) -> None:
    with pytest.raises(ApiError, match="either 'prompt' or 'messages'"):
        decode_body(body, TokenizeRequest, [])


def test_token_ids_are_not_negative() -> None:
    with pytest.raises(ApiError, match=r"tokens\[1\]"):
        decode_body(b'{"tokens": [0, -1]}', DetokenizeRequest, [])
