"""What a request may say, and what is said of one that may not."""

import json
import tracemalloc
from typing import Any

import pytest

from mini_engine.api.body import MAX_JSON_VALUES, MEASURED_BYTES, Body, parse_body
from mini_engine.api.completion_protocol import CompletionRequest
from mini_engine.api.errors import ApiError
from mini_engine.api.protocol import IGNORED, MAX_MESSAGES, MAX_PARTS, ChatRequest
from mini_engine.api.tokens import DetokenizeRequest, TokenizeRequest

MESSAGES = [{"role": "user", "content": "hello"}]


def parse(**fields: Any) -> ChatRequest:
    return parse_body(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), ChatRequest, ["m"])


def refusal(**fields: Any) -> ApiError:
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
    assert request.token_biases == {0: -100, 17: 100}
    assert (request.num_choices, parse().num_choices) == (128, 1)
    assert request.stop_strings == ["a", "b"]
    assert request.media_io_kwargs == {"video": {"fps": 1.5, "max_frames": None}, "image": {}}
    assert request.mm_processor_kwargs == {"size": {"longest_edge": 50176}, "cap_pixels_per_frame": True}
    assert request.include_usage
    assert request.temperature == 0


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(set(ChatRequest.model_fields) - {"model", "messages"})
    assert parse(**nulls) == parse()


def test_messages_come_out_as_they_went_in() -> None:
    content = [
        {"type": "text", "text": "What is it?"},
        {"type": "video_url", "video_url": {"url": "data:x"}},
        {"type": "image_url", "image_url": "data:y"},
    ]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    assert parse(messages=messages).plain_messages() == messages


def test_fields_that_change_nothing_are_ignored() -> None:
    assert parse(**dict.fromkeys(IGNORED, "anything")) == parse()


@pytest.mark.parametrize("name", sorted(ChatRequest.neutral))
def test_an_unsupported_field_is_taken_at_its_neutral_value_only(name: str) -> None:
    for neutral in (None, *ChatRequest.neutral[name]):
        assert parse(**{name: neutral}) == parse()
    error = refusal(**{name: {"some": "thing"}})
    assert error.status == 400
    assert error.body.param == name
    assert error.body.code == "unsupported_parameter"
    assert name in error.body.message


def test_json_tells_true_from_one() -> None:
    assert refusal(n=True).body.param == "n"
    assert refusal(logprobs=0).body.param == "logprobs"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 2.5}, "temperature", "at least 0 and at most 2"),
        ({"temperature": -1}, "temperature", "at least 0 and at most 2"),
        ({"temperature": "hot"}, "temperature", ""),
        ({"top_p": 0}, "top_p", "more than 0 and at most 1"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"top_k": 1.5}, "top_k", ""),
        ({"repetition_penalty": 0}, "repetition_penalty", "at least 0.01"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", ""),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "not both"),
        ({"min_p": 1.1}, "min_p", "at least 0 and at most 1"),
        ({"n": 0}, "n", "at least 1 and at most 128"),
        ({"n": 129}, "n", "at least 1 and at most 128"),
        ({"presence_penalty": 2.1}, "presence_penalty", "at least -2 and at most 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "at least -2 and at most 2"),
        ({"min_tokens": -1}, "min_tokens", "at least 0"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "at most 5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at least 0 and at most 20"),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed when 'logprobs' is true"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "at least -100 and at most 100"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "token ids, as strings"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "token ids, as strings"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "at most 1024"),
        ({"priority": 2**31}, "priority", "at most 2147483647"),
        ({"cache_salt": ""}, "cache_salt", "must not be empty."),
        ({"cache_salt": "x" * 257}, "cache_salt", "256"),
        ({"seed": 2**63}, "seed", "at most 9223372036854775807"),
        ({"stop": ""}, "stop", "must not be empty."),
        ({"stop": ["a", ""]}, "stop[1]", "must not be empty."),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": "x" * 1025}, "stop", "1024"),
        ({"stop": ["a", "x" * 1025]}, "stop[1]", "1024"),
        ({"stop_token_ids": [0] * 129}, "stop_token_ids", "128"),
        ({"stop_token_ids": [0, -1, -1]}, "stop_token_ids[1]", ""),
        ({"stop": ["a", "", ""]}, "stop[1]", "must not be empty."),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ""),
        ({"messages": []}, "messages", "Invalid 'messages': must not be empty."),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]},
            "messages[0].content[0]",
            "audio is not supported; send text, images and videos",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]},
            "messages[0].content[0]",
            "a file is not supported; send text, images and videos",
        ),
        ({"messages": "hi"}, "messages", ""),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing required parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ""),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", "Missing"),
        (
            {"messages": [{"role": "user", "content": [{"typ": "x"}]}]},
            "messages[0].content[0].typ",
            "Unknown parameter",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
            "Missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"uri": "x"}}]}]},
            "messages[0].content[0].image_url.uri",
            "Unknown parameter",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": "y"}]}, "messages[0].mood", "Unknown parameter"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "messages that call tools"),
        ({"messages": MESSAGES * (MAX_MESSAGES + 1)}, "messages", str(MAX_MESSAGES)),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_PARTS // 2 + 1)}] * 2},
            "messages",
            f"{MAX_PARTS + 2} content parts together, more than {MAX_PARTS}",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_PARTS + 1)}]},
            "messages[0].content",
            str(MAX_PARTS),
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed"),
        ({"stream": True, "stream_options": {"frobnicate": 1}}, "stream_options.frobnicate", "Unknown parameter"),
        ({"media_io_kwargs": {"audio": {}}}, "media_io_kwargs", "numbers under `video`"),
        ({"media_io_kwargs": {"video": 8}}, "media_io_kwargs", "numbers under `video`"),
        ({"media_io_kwargs": {"video": {"num_frames": [8]}}}, "media_io_kwargs", "numbers under `video`"),
        ({"media_io_kwargs": {"video": {"num_frames": 10**30}}}, "media_io_kwargs", "numbers under `video`"),
        ({"media_io_kwargs": {"video": dict.fromkeys(map(str, range(17)), 1)}}, "media_io_kwargs", "at most 16"),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs", "an object of at most 16"),
        ({"mm_processor_kwargs": {"size": {"longest_edge": {"a": 1}}}}, "mm_processor_kwargs", "objects of these"),
        ({"mm_processor_kwargs": {"size": "large"}}, "mm_processor_kwargs", "objects of these"),
        ({"mm_processor_kwargs": dict.fromkeys(map(str, range(17)), 1)}, "mm_processor_kwargs", "at most 16"),
        ({"frobnicate": 1}, "frobnicate", "Unknown parameter: 'frobnicate'"),
    ],
)
def test_refusals_name_the_field_and_what_it_may_hold(fields: dict[str, Any], param: str, says: str) -> None:
    error = refusal(**fields)
    assert error.status == 400
    assert error.body.type == "invalid_request_error"
    assert error.body.param == param
    assert says in error.body.message


def test_unknown_model() -> None:
    error = refusal(model="gpt-7")
    assert (error.status, error.body.code, error.body.param) == (404, "model_not_found", "model")
    assert "gpt-7" in error.body.message


def test_the_model_may_be_left_out() -> None:
    assert parse(model=None).model is None


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"a": "\\ud800"}']
)
def test_bad_json(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(body, ChatRequest, ["m"])
    assert caught.value.status == 400
    assert caught.value.body.code in ("invalid_json", "unknown_parameter", "missing_required_parameter")


def test_a_body_of_many_values_is_not_looked_into() -> None:
    """In memory they would take many times their size."""
    body = b'{"messages": [' + b"{}," * MAX_JSON_VALUES + b"{}]}"
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=f"{MAX_JSON_VALUES} JSON values") as caught:
            parse_body(body, ChatRequest, ["m"])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert (caught.value.status, caught.value.body.code) == (400, "invalid_json")


@pytest.mark.parametrize("text", [",", "[{", '\\",', "\\\\,", "\n,"])
def test_what_stands_in_texts_is_no_value(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text * (MAX_JSON_VALUES + 1)}]}
    assert (
        parse_body(json.dumps(body).encode(), ChatRequest, ["m"]).messages[0].content == body["messages"][0]["content"]
    )
    numbers = b'{"messages": ",\\",", "stop": [' + b"1," * MAX_JSON_VALUES + b"1]}"
    for other in (numbers, b'{"a": "' + b'\\",' * (MEASURED_BYTES // 3)):
        with pytest.raises(ApiError, match=f"{MAX_JSON_VALUES} JSON values"):
            parse_body(other, ChatRequest, ["m"])


@pytest.mark.parametrize("text", [rb"\ud800", rb"\ud800 and more of it", rb"\udc00", rb"\ud800A", rb"\uDbFfx"])
def test_half_of_a_pair_of_surrogates_is_named(text: bytes) -> None:
    with pytest.raises(ApiError, match="no valid Unicode"):
        parse_body(b'{"model": "' + text + b'"}', ChatRequest, ["m"])
    with pytest.raises(ApiError, match="truncated"):
        parse_body(rb'{"model": "\ud83d\u', ChatRequest, ["m"])


def test_an_error_does_not_repeat_the_media() -> None:
    error = refusal(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": ["A" * 10_000]}]}])
    assert len(error.body.message) < 300


MANY = 20_000
UNKNOWN = {f"x{number}": "y" for number in range(MANY)}
MANY_WRONG: list[tuple[type[Body], dict[str, Any]]] = [
    (ChatRequest, {"messages": [{}] * MANY}),
    (TokenizeRequest, {"messages": [{}] * MANY}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatRequest, {"messages": MESSAGES, "stop_token_ids": ["x"] * MANY}),
    (ChatRequest, {"messages": MESSAGES, "logit_bias": {f"x{number}": "y" for number in range(MANY)}}),
    (ChatRequest, {"messages": MESSAGES, "mm_processor_kwargs": {f"x{number}": "y" for number in range(MANY)}}),
    (ChatRequest, {"messages": MESSAGES, "media_io_kwargs": {f"x{number}": "y" for number in range(MANY)}}),
    (ChatRequest, {"messages": MESSAGES} | UNKNOWN),
    (ChatRequest, {"messages": [{"role": "user", "content": "x"} | UNKNOWN]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"} | UNKNOWN]}]}),
    (ChatRequest, {"messages": MESSAGES, "stream": True, "stream_options": UNKNOWN}),
    (CompletionRequest, {"prompt": "x"} | UNKNOWN),
    (CompletionRequest, {"prompt": [1.5] * MANY}),
    (CompletionRequest, {"prompt": [["x"]] * MANY}),
    (DetokenizeRequest, {"tokens": ["x"] * MANY}),
]


@pytest.mark.parametrize(("kind", "fields"), MANY_WRONG)
def test_many_mistakes_cost_no_more_than_one(kind: type[Body], fields: dict[str, Any]) -> None:
    """Beside what the JSON itself takes as Python's objects."""
    body = json.dumps(fields).encode()
    tracemalloc.start()
    try:
        json.loads(body)
        plain = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        with pytest.raises(ApiError) as caught:
            parse_body(body, kind, ["m"])
        assert tracemalloc.get_traced_memory()[1] < 2 * plain + (1 << 20)
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400
