"""POST /v1/chat/completions: what clients get for good requests, and what reaches the engine."""

import asyncio
import base64
import gc
import re
import time
from typing import Any

import pytest
import torch

from mini_engine.http import json_parts
from mini_engine.media.hashing import content_digest
from mini_engine.media.sources import local_files
from mini_engine.messages import Problem
from mini_engine.protocol.bodies import ChatRequest
from tests.support.patience import eventually
from tests.support.peers import as_requests
from tests.support.serving import ANSWER, CLIP, Counted, Served, check_error, choices_of, events_of, image, video


def with_usage(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_and_its_usage(served: Served, stream: bool) -> None:
    counted = Counted("request_success_total{finished_reason=length}")
    answer = await choices_of(await served.ask(**with_usage(stream)))
    assert (answer.texts, answer.reasons) == (["".join(ANSWER)], ["length"])
    (request,) = served.core.requests
    prompt, generated = len(request.prompt_token_ids), sum(map(len, map(served.encode, ANSWER)))
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (prompt, generated, prompt + generated)
    assert counted.since() == [1]
    assert (request.media, request.children) == ([], [])


@pytest.mark.parametrize("stream", [False, True])
async def test_choices(served: Served, stream: bool) -> None:
    texts = [["a red", " circle"], ["the blue", " square", " stands"], ["moving"]]
    served.core.script = lambda request: [served.encode(text) for text in texts[request.sampling.seed]]
    served.core.cached = 16
    answer = await choices_of(await served.ask([image()], n=3, seed=0, stop="square", **with_usage(stream)), 3)
    assert answer.texts == ["a red circle", "the blue ", "moving"]
    assert answer.reasons == ["length", "stop", "length"]
    (request,) = served.core.requests
    assert [one.request_id for one in as_requests(request)] == [f"{request.request_id}-{index}" for index in (1, 2)]
    assert len(request.media) == 1
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    delivered = ["a red", " circle", "the blue", " square", "moving"]  # with the token that completes the stop string
    assert answer.usage.completion_tokens == sum(map(len, map(served.encode, delivered)))


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_request(served: Served, stream: bool) -> None:
    served.says("a red", " circ", "le moving", " left")
    served.core.hold = True
    answer = await choices_of(await served.ask(stop=["circle"], stream=stream))
    assert (answer.texts, answer.reasons) == (["a red "], ["stop"])
    await eventually(lambda: bool(served.core.finishes))
    assert [finish.reason for finish in served.core.finishes] == ["stop"]


async def test_stop_token_is_in_the_text_where_it_is_asked_for(served: Served) -> None:
    served.says("a red")
    served.core.hold = True
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("x", {}, "a red"),
        ("x", {"include_stop_str_in_output": True}, "a redx"),
        ("<|im_end|>", {"skip_special_tokens": False}, "a red"),
        ("<|im_end|>", {"skip_special_tokens": False, "include_stop_str_in_output": True}, "a red<|im_end|>"),
        ("<|im_end|>", {"include_stop_str_in_output": True}, "a red"),
    ]
    for count, (text, fields, expected) in enumerate(cases, 1):
        (token,) = served.encode(text)
        asking = asyncio.create_task(served.ask(extra_body={"stop_token_ids": [token], **fields}))
        await served.core.end(await served.core.has_requests(count), "stop", tokens=[token])
        answer = await choices_of(await asking)
        assert (answer.texts, answer.reasons) == ([expected], ["stop"])
        assert answer.usage.completion_tokens == len(served.encode("a red")) + 1


async def test_error_of_the_engine_that_a_retry_may_avoid_is_a_503(served: Served) -> None:
    served.says()
    served.core.hold = True
    asking = served.asking("hello", structured_outputs={"choice": ["a"]})
    await served.core.end(await served.core.has_requests(), "error", Problem("its process was killed", retry=True))
    check_error(await asking, 503, "overloaded", "its process was killed")
    assert (await asking).headers["retry-after"] and (await asking).json()["error"]["param"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(served: Served, stream: bool) -> None:
    served.says("a red", " circ", "le 🎈", " left", " x")
    asked = {"logprobs": True, "top_logprobs": 2, "stop": ["left"], **with_usage(stream)}
    answer = await choices_of(await served.ask(**asked))
    listed = [one for part in answer.logprobs for one in part.content]
    assert answer.texts == ["a red circle 🎈 "]
    assert b"".join(bytes(one.bytes) for one in listed).startswith(answer.texts[0].encode())
    assert "".join(one.token for one in listed).startswith("a red circle ")
    assert len(listed) == answer.usage.completion_tokens
    for one in listed:
        assert (one.logprob, [other.logprob for other in one.top_logprobs]) == (-0.25, [-1.0, -2.0])
    assert (await served.ask()).choices[0].logprobs is None
    assert served.core.requests[1].sampling.logprobs is None


async def test_log_probabilities_of_the_prompt_are_beside_the_choices(served: Served) -> None:
    """One for each token, placeholders of media too, but the first."""
    body = (await served.post([image()], n=2, prompt_logprobs=0)).json()
    (request,) = served.core.requests
    first, *others = body["prompt_logprobs"]
    assert first is None and [[*likely] for likely in others] == [
        [str(token)] for token in request.prompt_token_ids[1:]
    ]
    assert len(body["choices"]) == 2 and "prompt_logprobs" not in body["choices"][0]
    assert "prompt_logprobs" not in (await served.post()).json()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("listing", [{}, {"prompt_logprobs": 2}])
async def test_response_in_parts_is_the_same(
    served: Served, path: str, listing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.says("<think>hm", '</think>a "red" ', "🎈 ", '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, "tools": tools}
    asked = {"n": 3, **(chat if "chat" in path else {"prompt": ["a", "b"], "logprobs": 2}), **listing}
    written = []
    for nbytes in (json_parts.PART_BYTES, 100):
        monkeypatch.setattr(json_parts, "PART_BYTES", nbytes)
        response = await served.http.post(path, json=asked)
        assert listing or response.headers["content-length"] == str(len(response.content))
        written.append(re.sub(r'"(id|created)":("[\w-]+"|\d+)', "", response.text))
    assert written[0] == written[1] and len(written[0]) > 1000


async def test_conversation_and_tensors_are_freed_once_the_engine_has_them(served: Served) -> None:
    """An answer may take long."""
    await served.post([image(84)])
    gc.collect()
    gc.freeze()  # what is there by now is in no list of objects
    served.core.hold = True
    for count, stream in enumerate((False, True), 2):
        await served.connect_chat(content=[image()], stream=stream)
        await served.core.output(await served.core.has_requests(count), [65])
        await eventually(lambda: not {ChatRequest, torch.Tensor} & set(map(type, gc.get_objects())))
    gc.unfreeze()


# --- media -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "cases"), [
    (video(), [
        ({}, 24),
        ({"media_io_kwargs": {"video": {"num_frames": 4}}}, 8),
        ({"mm_processor_kwargs": {"num_frames": 4}}, 8),
        ({"media_io_kwargs": {"video": {"fps": 3.0, "max_frames": None}, "image": {}}, "mm_processor_kwargs": {}}, 8),
    ]),
    (image(140), [
        ({}, 25),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 8 * 28 * 28}}}, 4),
        ({"media_io_kwargs": {"video": {"num_frames": 4}}}, 25),  # an image does not depend on what is said of videos
    ]),
])  # fmt: skip
async def test_request_may_ask_for_fewer_frames_or_smaller_items(served: Served, part: Any, cases: Any) -> None:
    for fields, tokens in [*cases, *cases]:
        assert (await served.post([part], **fields)).json()["usage"]["media"][0]["tokens"] == tokens
    items = [request.media[0] for request in served.core.requests]
    assert all(item.patches is None for item in items[len(cases) :])
    hashes = [item.media_hash for item in items[: len(cases)]]
    assert hashes[0] != hashes[1] and (hashes[0] == hashes[2]) == (part == image(140))


@pytest.mark.parametrize(("part", "kind"), [(image(), "image"), (video(), "video")])
async def test_parts_by_other_names_are_the_same(served: Served, part: Any, kind: str) -> None:
    url, texts = part[f"{kind}_url"]["url"], [{"type": f"{name}text", "text": "what?"} for name in ("", "input_")]
    head, _, data = url.partition(",")
    (path := served.allowed / f"a {kind}").write_bytes(base64.b64decode(data))
    named = [
        {"type": f"input_{kind}", f"{kind}_url": url},
        {"type": f"{kind}_url", f"{kind}_url": {"url": url, "detail": "low"}},
        {"type": "file", "file": {"file_data": url}},
        {"type": "image_url", "image_url": f"{head.upper()},{data}"},
    ]
    named += [{"type": kind, kind: str(path), "uuid": "1"}, {"type": kind, "url": f"file://{path}", "x": {}}]
    for content in ([part, texts[0]], *([other, texts[1]] for other in named)):
        assert (await served.post(content)).status_code == 200
    first, *others = [(one.prompt_token_ids, one.media[0].media_hash) for one in served.core.requests]
    assert others == [first] * len(named)


async def test_a_file_is_read_again_only_if_it_must_be_decoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns() + 2 * local_files.SETTLED_NS
    monkeypatch.setattr(time, "time_ns", lambda: now)
    (path := served.allowed / "a picture").write_bytes(base64.b64decode(image()["image_url"]["url"].partition(",")[2]))
    part, reads = {"type": "image_url", "image_url": path.as_uri()}, []
    monkeypatch.setattr(local_files, "content_digest", lambda data: reads.append(data) or content_digest(data))
    for num_reads in (1, 2, 2):  # the engine does not have it, twice; then it has it
        served.core.kept = {} if num_reads > len(reads) else served.core.kept
        assert (await served.post([part])).status_code == 200 and len(reads) == num_reads
    assert len({request.media[0].media_hash for request in served.core.requests}) == 1
    served.core.kept.clear()
    monkeypatch.setattr(local_files, "content_digest", lambda _: b"of another")
    assert "was changed" in (await served.post([part])).json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_says_what_the_model_saw_and_what_the_engine_had(served: Served, stream: bool) -> None:
    fewer = {"media_io_kwargs": {"video": {"num_frames": 4}}}
    for cached in (None, "patches", "embeddings", "facts"):
        served.core.held = cached or "patches"
        answer = await served.ask([image(140), video()], extra_body=fewer, **with_usage(stream))
        usage = (await choices_of(answer)).usage
        frames = {"frames": 4, "seconds_per_frame": 0.3, "timestamps": [0.0, 0.3, 0.7, 1.1]}
        assert usage.media == [
            {"type": "image", "width": 140, "height": 140, "tokens": 25, "cached": cached},
            {"type": "video", "width": 56, "height": 56, "tokens": 8, **frames, "cached": cached},
        ]
        details = usage.prompt_tokens_details
        assert (details.image_tokens, details.video_tokens) == (25, 8)
        is_decoded = [item.patches is not None for item in served.core.requests[-1].media]
        assert is_decoded == [cached in (None, "facts")] * 2
    assert not hasattr((await choices_of(await served.ask(**with_usage(stream)))).usage, "media")


async def test_part_of_a_video_is_answered_with_a_warning_where_the_server_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.context.media_loader, "_allow_partial", True)
    cut = CLIP[: len(CLIP) * 7 // 10]
    content = [video(cut), image(), video(cut)]
    first, second = (await served.post(content, n=2)).json()["warnings"]
    assert first.startswith(f"video 1: {len(cut)} of at least {len(CLIP)} bytes are there; ")
    assert first.endswith(" frames were read") and second == first.replace("video 1", "video 2")
    for options in ({}, {"stream_options": {"include_usage": True}}):
        response = await served.post(content, stream=True, return_timings=True, **options)
        *others, last = events_of(response)
        assert last["warnings"] == [first, second] and "metrics" in last and ("usage" in last) == bool(options)
        assert not any("warnings" in chunk or "metrics" in chunk for chunk in others)
    assert "warnings" not in (await served.post([video()])).json()
    cold, again = served.core.requests[:2]
    assert [item.patches is None for item in again.media] == [False, True, False]  # a part is never a hit
    assert [item.cacheable for item in cold.media] == [False, True, False]
    assert len({request.media[0].media_hash for request in (cold, again)}) == 2
