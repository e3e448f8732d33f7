"""Requests that are refused: what the error says of each field, of media, and of a body that is no JSON."""

import asyncio
import base64
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from mini_engine.protocol.bodies import ChatRequest
from tests.support.patience import PATIENCE, eventually
from tests.support.serving import (
    CLIP,
    LIMITS,
    MAX_MEDIA_BYTES,
    MAX_MODEL_LEN,
    MAX_REQUEST_BYTES,
    Serve,
    Served,
    SlowWeb,
    chat_body,
    check_error,
    image,
    video,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VALUE, UNKNOWN, MISSING = "invalid_value", "unknown_parameter", "missing_required_parameter"
UNSUPPORTED, TOO_LONG = "unsupported_parameter", "context_length_exceeded"
PART = "messages[0].content[0]"  # a parameter


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def tool(**properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": properties}}}}


# --- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "cases"), [
    (CHAT, [
        ({"model": "other"}, "model_not_found", "model", "does not exist; this server has tiny, alias."),
        ({"max_token": 1}, UNKNOWN, "max_token", "did you mean 'max_tokens'?"),
        ({"guided_json": {}}, UNKNOWN, "guided_json", "'guided_json'; use 'structured_outputs.json'."),
        ({"functions": []}, UNKNOWN, "functions", "use 'tools'."),
        ({"stream_options": {"x - at $y": 1}}, UNKNOWN, "stream_options.x - at $y", "x - at $y'; leave it out"),
        ({"a$b": 1}, UNKNOWN, "a$b", "Unknown parameter: 'a$b'; leave it out; variables of the chat template"),
        ({"chat_template_kwargs": {"part": [[]] * 2100}}, VALUE, "chat_template_kwargs.part", "more than 4096 arrays"),
        ({"temperature": 101}, VALUE, "temperature", "<= 100.0"),
        ({"n": 129}, VALUE, "n", "<= 128"),
        ({"min_tokens": 6, "max_tokens": 5}, VALUE, "min_tokens", "at most 5"),
        ({"top_logprobs": 2}, VALUE, "top_logprobs", "only allowed when 'logprobs' is true"),
        ({"logit_bias": {"5": 101}}, VALUE, "logit_bias[...]", "<= 100"),
        ({"seed": 2**63}, VALUE, "seed", "9223372036854775807"),
        ({"stop": ["a", ""]}, VALUE, "stop[1]", "length >= 1"),
        ({"stop_token_ids": [10**6]}, VALUE, "stop_token_ids", "token id 1000000 out of range"),
        ({"stream": False, "stream_options": {"include_usage": True}}, VALUE, "stream_options", "only allowed"),
        ({"structured_outputs": {"regex": "a" * 100_001}}, VALUE, "structured_outputs", "more than 100000 bytes"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, VALUE, "structured_outputs", "exactly one of json, "),
        ({"tools": [], "tool_choice": tool()}, VALUE, "tool_choice", "function that is not in 'tools'"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [tool(), {"type": "function", "function": {"name": "other"}}],
        }}}, VALUE, "tool_choice", "function that is not in 'tools'"),
        ({"tool_choice": {"type": "allowed_tools"}}, VALUE, "tool_choice", "has `allowed_tools`, and no other"),
        ({"tool_choice": {"type": "custom"}}, VALUE, "tool_choice.type", "send one of allowed_tools, function."),
        ({"tools": [tool()], "tool_choice": "required", "response_format": {"type": "json_object"}}, VALUE,
         "tool_choice", "with structured output"),
        ({"response_format": {"type": "text", "schema": {}}}, VALUE, "response_format", "only the type json_object"),
        (user({"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0="}}), VALUE, f"{PART}.file",
         "send the pages of a document as images"),
        ({"chat_template_kwargs": {"tools": 1}}, VALUE, "chat_template_kwargs", "set 'tools' as a field"),
        ({"continue_final_message": True, "add_generation_prompt": True}, VALUE, "messages", "not compatible"),
        ({"echo": 0}, UNSUPPORTED, "echo", "send false"),
        ({"length_penalty": 2}, UNSUPPORTED, "length_penalty", "send 1"),
        ({"bad_words": ["red"]}, UNSUPPORTED, "bad_words", "send []"),
        ({"prompt_logprobs": 21}, VALUE, "prompt_logprobs", "<= 20"),
        ({"prompt_logprobs": 1, "stream": True}, VALUE, "prompt_logprobs", "only allowed without 'stream'"),
        ({"media_io_kwargs": {"audio": {}}}, VALUE, "media_io_kwargs", "'audio'; send one of image, video."),
        ({"messages": None}, VALUE, "messages", "got `null`"),
        ({"messages": []}, VALUE, "messages", "length >= 1"),
        ({"messages": [{"role": "user"}]}, VALUE, "messages[0]", "needs `content`"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, VALUE, "messages[0].function_call", "`null`"),
        (user(text("word " * 700)), TOO_LONG, "messages", f"{MAX_MODEL_LEN}"),
        (user({"type": "output_image"}), VALUE, PART + ".type", "'output_image'; send one of file, image, image_url, "),
        (user({"type": "refusal", "refusal": "x"}), VALUE, "messages[0]", "only the role assistant may have a part"),
        (user({"text": "x"}), MISSING, PART + ".type", "Missing required parameter"),
        (user({**text("x"), "image": "y"}), VALUE, PART, "has `text`, and no other of these"),
        (user({"type": "image", "video": "y"}), VALUE, PART, "has `image_url` or `image` or `url`, "),
        (user(image() | {"fps": 0}), VALUE, PART + ".fps", "> 0.0"),
        (user(image() | {"fps": 1, "nframes": 2}), VALUE, PART, "either `fps` or `nframes`"),
        (user(image() | {"resized_width": 8}), VALUE, PART, "`resized_width` of a part is not supp"),
        (user(video() | {"num_frames": 8}), VALUE, PART, "`num_frames` of a part is not supported; "),
        (user(image() | {"uuid": ""}), VALUE, PART + ".uuid", "length >= 1"),
        (user(image() | {"uuid": "a" * 257}), VALUE, PART + ".uuid", "length <= 256"),
        (user({"type": "image", "uuid": "a"}), MISSING, "cache_salt", "image 1: a `uuid` alone needs a `cache_salt`"),
        (user({"type": "image_url", "image_url": {}}), MISSING, PART + ".image_url.url", "Missing"),
        ({"media_io_kwargs": {"video": {"timestamps": [0, 1, 1]}}}, VALUE, "media_io_kwargs", "later than the one"),
        ({"media_io_kwargs": {"video": {"timestamps": [*range(10_001)]}}}, VALUE, "media_io_kwargs", "length <= 10000"),
    ]),
    (COMPLETIONS, [
        ({}, MISSING, "prompt", "Missing required parameter: 'prompt'"),
        ({"prompt": []}, VALUE, "prompt", "length >= 1"),
        ({"prompt": "x", "max_tokens": 0}, VALUE, "max_tokens", "only allowed with 'echo'"),
        ({"prompt": "x", "max_tokens": -1, "echo": True}, VALUE, "max_tokens", ">= 0"),
        ({"prompt": ["a", ""]}, VALUE, "prompt", "empty"),
        ({"prompt": ["a", 1]}, VALUE, "prompt", "cannot be mixed"),
        ({"prompt": ["a"] * 65, "n": 2}, VALUE, "prompt", "65 prompts with 2 choices each are more"),
        ({"prompt": [10**6]}, VALUE, "prompt", "token id 1000000"),
        ({"prompt": "a <|image_pad|>"}, VALUE, "prompt", "<|image_pad|>"),
        ({"prompt": "a", "return_timings": True}, UNSUPPORTED, "return_timings", "not supported"),
    ]),
    ("/tokenize", [
        (user(text("x")) | {"prompt": "x"}, MISSING, "prompt", "either 'prompt' or 'messages'"),
        ({"prompt": "some words " * 3000}, TOO_LONG, "prompt", "maximum context length is"),
        (user(text("x")) | {"add_special_tokens": True}, VALUE, "add_special_tokens", "only allowed"),
        (user({"type": "image", "uuid": "a"}), "invalid_media", "messages", "image 1: has a `uuid` alone"),
    ]),
    ("/detokenize", [
        ({"tokens": [10**6]}, VALUE, "tokens", "token id 1000000"),
        ({"tokens": [-1]}, VALUE, "tokens[0]", ">= 0"),
    ]),
])  # fmt: skip
async def test_errors_name_the_field_and_what_it_may_hold(
    served: Served, path: str, cases: list[tuple[dict[str, Any], str, str, str]]
) -> None:
    """Those of a stream too, before anything is streamed."""
    for fields, code, param, says in cases:
        body = {**(chat_body() if path == CHAT else {}), **fields}
        for sent in [body, {"stream": True, **body}] if path in (CHAT, COMPLETIONS) else [body]:
            response = await served.http.post(path, json=sent)
            check_error(response, 404 if code == "model_not_found" else 400, code, says)
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert len(error["message"]) < 400
    assert not served.core.requests


async def test_token_id_of_a_placeholder_is_refused(served: Served) -> None:
    response = await served.http.post(COMPLETIONS, json={"prompt": served.encode("<|image_pad|>")})
    check_error(response, 400, VALUE, "placeholder for media")
    assert response.json()["error"]["param"] == "prompt"


async def test_null_ignored_and_neutral_values_change_nothing(served: Served) -> None:
    nothing = dict.fromkeys({*ChatRequest.__struct_fields__, "audio", "functions"} - {"model", "messages"})
    neutral: dict[str, Any] = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text", "schema": None}}
    neutral |= {"echo": False, "verbosity": "low", "store": True, "metadata": {}, "service_tier": "flex"}
    neutral |= {"use_beam_search": False, "length_penalty": 1.0, "include_reasoning": True}
    neutral |= {"bad_words": [], "return_token_ids": False, "spaces_between_special_tokens": False}
    variables = {"enable_thinking": False, "documents": [{"text": "x"}], "used": [True, False] * 2000}
    neutral |= {"reasoning_effort": "high", "chat_template_kwargs": variables}
    cached = {"cache_control": {"type": "ephemeral"}}
    part = {**text("hello"), **cached, "text_signature": None}
    annotated = {"role": "user", "content": [part], "name": "me", **cached}
    for fields in (nothing, neutral, {"messages": [annotated]}):
        assert (await served.post(**fields)).status_code == 200
    await served.complete(echo=False, suffix=None, best_of=1, user="me", logprobs=None)
    first, *others = [request.sampling for request in served.core.requests]
    same = {"seed": first.seed, "max_tokens": first.max_tokens}
    assert all(msgspec.structs.replace(sampling, **same) == first for sampling in others)


async def test_an_unknown_null_counts_as_absent_wherever_it_is_and_one_in_a_schema_stays(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": None}, "version": None}}
    response = await served.post(response_format=form, stream_options={"other": None}, stream=True, audio=None)
    assert response.status_code == 200 and '{"const": null,' in served.core.requests[-1].grammar
    form["json_schema"] |= {"version": 1}
    for fields, name in (({"response_format": form}, "response_format.json_schema.version"), ({"a - at `$.b`": 1}, "")):
        check_error(await served.post(**fields, audio=None), 400, "unknown_parameter", f"Unknown parameter: '{name}")


# --- media -----------------------------------------------------------------------------------------------------------


async def test_errors_name_the_item_and_the_limit(serve: Serve) -> None:
    def file_part(path: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"file://{path}"}}

    def data_part(data: bytes) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"}}

    cut, uneven = CLIP[: len(CLIP) * 7 // 10], {"video": {"timestamps": [0, 1]}}
    bad_media: list[tuple[list[Any], dict[str, Any], str, str, str]] = [
        ([image()] * 6, {}, VALUE, "messages", "6 image items, more than the 5"),
        ([data_part(b"AAAA")], {}, "invalid_media", "messages", "image 1"),
        ([video()], {"media_io_kwargs": uneven}, "invalid_media", "messages", "video 1: timestamps are for a video"),
        ([image(), data_part(b"x" * (MAX_MEDIA_BYTES + 1))], {}, "invalid_media", "messages", "--max-media-bytes"),
        ([file_part("/etc/hostname")], {}, "invalid_media", "messages", "no such regular file"),
        ([{"type": "image", "image": "/etc/hostname"}], {}, "invalid_media", "messages", "image 1: no such regular"),
        ([{"type": "video", "video": "a.mp4"}], {}, "invalid_media", "messages", "video 1: the URL must start with"),
        # The base64 of a JPEG, which looks like a path.
        (
            [{"type": "image", "image": "/9j/4AAQSkZJRg=="}],
            {},
            "invalid_media",
            "messages",
            "; base64 needs data:<media",
        ),
        ([video(), video(cut)], {}, "invalid_media", "messages", "video 2: the file is truncated or damaged"),
        ([image(140), image(141)], {}, "media_too_large", "messages", "--encoder-cache-tokens 50"),
        ([video()], {"media_io_kwargs": {"video": {"x": 3}}}, VALUE, "media_io_kwargs", "unknown field `x`"),
        ([], {"media_io_kwargs": {"image": {"x": 1}}}, VALUE, "media_io_kwargs", "images have no settings"),
        ([], {"mm_processor_kwargs": {"x": 0}}, VALUE, "mm_processor_kwargs", "unknown field `x`"),
    ]
    async with serve(limit_mm_per_prompt={"image": 5}) as served:
        (served.allowed / "large").write_bytes(b"x" * MAX_MEDIA_BYTES)
        large = [file_part(f"{served.allowed}/large")] * 5
        together = (large, {}, "media_too_large", "messages", "--max-inflight-media-gb")
        for content, fields, code, param, says in [*bad_media, together]:
            response = await served.post([*content, text("what?")], stream=True, **fields)
            check_error(response, 400, code, says)
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert str(served.allowed) not in response.text and "/etc" not in response.text
            await eventually(served.at_rest)  # a thread may be processing the item that did not fail
        assert served.core.requests == []
        await served.ask([image(140), image(140)])  # the same twice is encoded once
        assert sum(item.num_tokens for item in served.core.requests[0].media) > LIMITS.max_prompt_media_tokens


async def test_token_ids_are_checked_before_media_are_loaded(served: Served, web: SlowWeb) -> None:
    response = await served.post([web.part], logit_bias={"99999": 1})
    check_error(response, 400, VALUE, "token id 99999 out of range")
    assert not web.dialled


# --- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_body_is_refused_by_its_headers(served: Served, path: str) -> None:
    """A page may make a browser send the first of these types without a preflight."""

    async def response_to_headers(*headers: str) -> tuple[bytes, dict[str, str]]:
        """Head and error of the response to a request whose body is not sent."""
        reader, _ = await served.connect("\r\n".join([f"POST {path} HTTP/1.1", "host: x", *headers, "", ""]).encode())
        async with asyncio.timeout(PATIENCE):
            head = await reader.readuntil(b"\r\n\r\n")
            return head, json.loads(await reader.readuntil(b"}}"))["error"]

    for given in (None, "", "text/plain", "application/x-www-form-urlencoded", "application/json-seq"):
        typed = [] if given is None else [f"content-type: {given}"]
        head, error = await response_to_headers(*typed, "content-length: 9")
        assert b" 415 " in head and b"\r\naccept: application/json\r\n" in head
        assert error["code"] == "invalid_http" and "'Content-Type: application/json'" in error["message"]
    large = f"content-length: {MAX_REQUEST_BYTES + 1}"
    head, error = await response_to_headers("content-type: application/json", large)
    assert b" 413 " in head and error["code"] == "request_too_large"
    coded = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await served.http.post(path, content=gzip.compress(b"{}"), headers=coded)
    check_error(response, 415, "invalid_http")
    assert response.headers["accept-encoding"] == "identity"


async def test_content_type_may_have_parameters(served: Served) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8", "content-encoding": "Identity"}
    assert (await served.http.post("/tokenize", content=b'{"prompt": "x"}', headers=headers)).status_code == 200


async def test_body_that_is_no_json_object_is_a_400(served: Served) -> None:
    not_json = [b"", b"{", b"[]", b'"x"', b'{"user": NaN}', b'{"user": ' + b"[" * 100_000]
    not_unicode = [b'{"model": "\xff"}', b'{"model": "\\ud800"}']
    for body in not_json + not_unicode:
        response = await served.http.post(CHAT, content=body, headers={"content-type": "application/json"})
        check_error(response, 400, "invalid_json")


@pytest.mark.parametrize(
    ("begin", "limit"),
    [
        (b'{"url": "data:image/png;base64,', f"{MAX_REQUEST_BYTES} bytes, the limit of --max-request-bytes"),
        (b'{"text": "data:image/png;base64,', f"{4 << 20} bytes besides the base64 data of its images and videos"),
    ],
)
async def test_body_without_a_length_is_read_up_to_the_limit(served: Served, begin: bytes, limit: str) -> None:
    async def blocks() -> AsyncIterator[bytes]:
        yield begin
        for _ in range(MAX_REQUEST_BYTES // 65536 + 1):
            yield b"A" * 65536

    response = await served.http.post(CHAT, content=blocks(), headers={"content-type": "application/json"})
    check_error(response, 413, "request_too_large", limit)
    assert (await served.post()).status_code == 200


async def test_structure_is_bounded(served: Served) -> None:
    def filled(begin: str, item: str, end: str, size: int = 4 << 20) -> bytes:
        """A body of nearly `size` bytes with as many items as it has room for."""
        return (begin + ",".join([item] * ((size - 200) // (len(item) + 1))) + end).encode()

    deep = "more than 131072 arrays, objects, fields and items"
    chat = '{"messages": [{"role": "user", "content": "x"}], '
    call = '{"messages": [{"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "f", "arguments": "'
    large: list[tuple[str, bytes, int, str]] = [
        (CHAT, filled(chat + '"chat_template_kwargs": {"part": [', "[]", "]}}"), 413, deep),
        (CHAT, filled(chat + '"metadata": [', "9e300", "]}", 20_000), 413, deep),
        (CHAT, filled(chat + '"metadata": [', "1" * 4300, "]}", 99_000), 413, deep),
        (CHAT, filled(call + "[", "1E308", ']"}}]}]}', 20_000), 400, "The 'arguments' of all calls have " + deep),
        (CHAT, filled('{"messages": [{"role": "user", "content": [', '{"type":"text","text":""}', "]}]}", 200_000), 400,
         "length <= 4096"),
        (CHAT, filled(call + "[", "[]", ']"}}]}]}'), 400, "The 'arguments' of all calls have " + deep),
        (CHAT, filled(chat + '"tool_choice": "required", "tools": [', json.dumps(tool(const="a" * 40_000)), "]}"), 400,
         "more than 100000 bytes"),
        (COMPLETIONS, filled('{"prompt": "x", "echo": [', '"a"', "]}"), 413, deep),
        (COMPLETIONS, filled('{"prompt": [', "1", "]}"), 413, deep),
        (COMPLETIONS, filled('{"prompt": [', "1", "]}", 2 << 20), 400,
         f"This model's maximum context length is {MAX_MODEL_LEN} tokens (--max-model-len), but the prompt has 1048"),
        ("/tokenize", filled(call + "[", "[]", ']"}}]}]}'), 400, deep),
        ("/detokenize", filled('{"tokens": [', "1", "]}", 2 << 20), 400, f"more than --max-model-len, {MAX_MODEL_LEN}"),
    ]  # fmt: skip
    for path, body, status, says in large:
        response = await served.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == status and says in response.json()["error"]["message"], response.text
    # Characters of texts are no structure.
    response = await served.http.post("/detokenize", json={"tokens": [], "model": '\\"[{:,' * 100_000})
    check_error(response, 404, "model_not_found")
