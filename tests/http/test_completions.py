"""POST /v1/completions, /tokenize and /detokenize."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mini_engine.media import settings as media_settings
from mini_engine.prompt import prompt_echo, sampling_params
from mini_engine.prompt.prompt_echo import LogprobTables, PromptEcho
from tests.support.patience import eventually
from tests.support.serving import ANSWER, MAX_MODEL_LEN, Counted, Served, choices_of, image, video


async def test_text_goes_on(served: Served) -> None:
    response = await served.http.post("/v1/completions", json={"prompt": "hello"})
    (request,) = served.core.requests
    assert request.prompt_token_ids == served.encode("hello") and request.sampling.max_tokens == 16
    assert response.json()["id"] == request.request_id == response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("count", [1, 3])
async def test_every_choice_is_of_its_prompt(served: Served, count: int, as_tokens: bool, stream: bool) -> None:
    """Choice i of prompt p has the index p * n + i."""
    texts = ["one more", "another text", "third"][:count]
    token_ids = [served.encode(text) for text in texts]
    asked = token_ids if as_tokens else texts
    served.core.cached = 3
    served.core.script = lambda request: [
        *([one] for one in request.prompt_token_ids),
        served.encode(str(request.sampling.seed)),
    ]
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    fields = {"n": 2, "seed": 0, "stream": stream, "max_tokens": 50, **options}
    answer = await choices_of(await served.complete(asked[0] if count == 1 else asked, **fields), 2 * count)
    assert answer.texts == [f"{text}{number}" for text in texts for number in (0, 1)]
    assert [request.prompt_token_ids for request in served.core.requests] == token_ids
    assert answer.usage.prompt_tokens == sum(map(len, token_ids))
    assert answer.usage.prompt_tokens_details.cached_tokens == 3 * count


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(served: Served, stream: bool) -> None:
    answer = await choices_of(await served.complete(logprobs=2, stream=stream))
    tokens = [token for part in answer.logprobs for token in part.tokens]
    assert answer.texts == ["".join(tokens)] == ["".join(ANSWER)]
    offsets = [offset for part in answer.logprobs for offset in part.text_offset]
    assert offsets == [len("".join(tokens[:count])) for count in range(len(tokens))]
    assert {value for part in answer.logprobs for value in part.token_logprobs} == {-0.25}
    for token, likely in zip(tokens, [one for part in answer.logprobs for one in part.top_logprobs], strict=True):
        assert likely.pop(token) == -0.25 and list(likely.values()) == [-1.0, -2.0]


async def test_tokens_that_are_parts_of_a_character_are_listed_as_bytes(served: Served) -> None:
    parts = served.encode("é")
    assert len(parts) == 2
    served.core.script = lambda request: [[*served.encode("x"), *parts, *served.encode("!")]]
    logprobs = (await served.complete(logprobs=0)).choices[0].logprobs
    assert logprobs.tokens == ["x", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs.text_offset == [0, 1, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("logprobs", "max_tokens"), [(2, 0), (0, 9), (None, 0), (None, 9)])
async def test_echo(
    served: Served, logprobs: int | None, max_tokens: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt before its choices, with special tokens, in several pieces; alone with no token of an answer."""
    monkeypatch.setattr(prompt_echo, "PIECE_ENTRIES", 7)
    texts = ["<|im_start|>one stop é é", "x"]
    served.core.script = lambda request: [served.encode(word)[:1] for word in ANSWER]
    served.core.cached = 1
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    asked = {"n": 2, "logprobs": logprobs, "max_tokens": max_tokens, "stream": stream, "stop": "stop", **usage}
    answer = await choices_of(await served.complete(texts, echo=True, **asked), 4)
    said = "".join(map(served.context.renderer.tokenizer.decode, served.core.script(served.core.requests[0])))
    assert answer.texts == [text + said * bool(max_tokens) for text in texts for _ in range(2)]
    assert answer.reasons == ["length"] * 4
    assert answer.usage.completion_tokens == (4 * len(ANSWER) if max_tokens else 0)
    assert {request.sampling.max_tokens for request in served.core.requests} == {max_tokens or 1}
    assert {request.sampling.prompt_logprobs for request in served.core.requests} == {logprobs}
    assert bool(answer.logprobs) is (logprobs is not None)


async def test_log_probabilities_of_an_echoed_prompt(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of an answer's, which follow, and in vLLM's; the first token has none."""
    monkeypatch.setattr(prompt_echo, "PIECE_ENTRIES", 7)
    text = "<|im_start|>one two three"
    served.says("!")
    body = {"prompt": text, "echo": True, "logprobs": 1, "prompt_logprobs": 2, "max_tokens": 1}
    choice = (await served.http.post("/v1/completions", json=body)).json()["choices"][0]
    ids, listed = served.encode(text), choice["logprobs"]
    names = [served.context.vocabulary.bytes_of(token_id).decode() for token_id in ids]
    likely = [served.context.vocabulary.bytes_of(65 + rank).decode() for rank in range(2)]
    assert len(ids) > 7 and served.core.requests[0].sampling.prompt_logprobs == 2
    assert listed["tokens"] == [*names, "!"]
    assert listed["text_offset"] == [len("".join(names[:count])) for count in range(len(ids) + 1)]
    own = [None, *(-0.5 - index for index in range(1, len(ids))), -0.25]
    assert listed["token_logprobs"] == own
    others = [{likely[0]: -1.0, name: logprob} for name, logprob in zip([*names, "!"], own, strict=True)]
    assert listed["top_logprobs"] == [None, *others[1:]]
    assert choice["prompt_logprobs"] == [None] + [
        {
            str(token_id): {"logprob": logprob, "rank": 7, "decoded_token": name},
            "65": {"logprob": -1.0, "rank": 1, "decoded_token": likely[0]},
            "66": {"logprob": -2.0, "rank": 2, "decoded_token": likely[1]},
        }
        for token_id, logprob, name in [*zip(ids, own, names, strict=False)][1:]
    ]


async def test_listed_prompts_are_bounded_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one beside short ones may list more than its share; too many are refused before any is computed."""
    served.says("!")
    prompts = ["a red circle " * 9, "x", "y"]
    body = {"prompt": prompts, "n": 2, "max_tokens": 0, "echo": True, "logprobs": 1}
    listed = 2 * 2 * sum(len(served.encode(prompt)) for prompt in prompts)
    monkeypatch.setattr(sampling_params, "MOST_LISTED", listed)
    assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    served.core.requests.clear()
    monkeypatch.setattr(sampling_params, "MOST_LISTED", listed - 1)
    refused = (await served.http.post("/v1/completions", json=body)).json()["error"]
    assert f"more than {listed - 1}, all choices together" in refused["message"] and not served.core.requests


async def test_listed_prompts_are_encoded_as_the_client_reads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON they are megabytes for each choice."""
    tables, made = PromptEcho.tables, list[int]()

    def counted(prompt: PromptEcho) -> Iterator[LogprobTables]:
        for piece in tables(prompt):
            made.append(len(piece))
            yield piece

    monkeypatch.setattr(PromptEcho, "tables", counted)
    served.says("!")
    prompt = served.encode("a red circle moves left ")
    prompt = (prompt * MAX_MODEL_LEN)[: MAX_MODEL_LEN - 1]
    body = {"prompt": prompt, "n": 8, "max_tokens": 1, "prompt_logprobs": 20}
    async with served.http.stream("POST", "/v1/completions", json=body) as response:
        parts = response.aiter_raw()
        read = [await anext(parts)]
        assert 0 < sum(made) < 4 * len(prompt)
        read += [part async for part in parts]
    choices = json.loads(b"".join(read))["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [len(prompt)] * 8 and sum(made) == 8 * len(prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_that_fails_ends_the_others(served: Served, stream: bool) -> None:
    served.says()
    served.core.hold = True
    asking = asyncio.create_task(served.complete(["a", "b"], stream=stream))
    first, second = (await served.core.has_requests(2)) and served.core.requests
    await served.core.end(second, "error")
    with pytest.raises(openai.InternalServerError, match="has aborted"):
        await asking
    await served.core.has_aborted(first.request_id)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_ends_all_prompts(served: Served, stream: bool) -> None:
    served.says()
    served.core.hold = True
    counted = Counted("request_success_total{finished_reason=abort}")
    body = {"prompt": ["a", "b"], "n": 2, "stream": stream}
    asking = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await eventually(lambda: len(served.core.running) == 4)
    samples = list(served.core.running)
    asking.cancel()
    await served.core.has_aborted(*samples)
    await eventually(lambda: counted.since() == [2])


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["hello", "a red circle", "café 🎈", "<|im_start|>user", "an <|image_pad|>", ""])
async def test_text_to_tokens_and_back(served: Served, text: str) -> None:
    body = (await served.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert body["tokens"] == served.encode(text)
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), MAX_MODEL_LEN)
    assert list(map(served.context.renderer.tokenizer.token_to_id, body["token_strs"])) == body["tokens"]
    back = await served.http.post("/detokenize", json={"model": "tiny", "tokens": body["tokens"]})
    assert back.json() == {"prompt": text}


@pytest.mark.parametrize(("content", "more"), [
    ("what?", {}),
    ([image(57), {"type": "text", "text": "what?"}, image(111)], {}),
    ([image(111)], {"mm_processor_kwargs": {"max_pixels": 56 * 56}}),
    ([video(), video() | {"nframes": 2, "max_pixels": 56 * 56}], {"max_completion_tokens": MAX_MODEL_LEN - 128}),
    ([video()], {"mm_processor_kwargs": {"fps": 5, "do_sample_frames": True}}),
    *[([video()], {"media_io_kwargs": {"video": asked}}) for asked in ({"fps": 5}, {"num_frames": 3}, {"end": 0.2})],
    ([video()], {"max_completion_tokens": MAX_MODEL_LEN - 64}),  # which leaves less room for the video
    ([{"type": "video",
       "video": "data:video/jpeg;base64," + ",".join([image(57)["image_url"]["url"].partition(",")[2]] * 3)}],
     {"media_io_kwargs": {"video": {"timestamps": [0, 0.5, 1.5]}}}),
])  # fmt: skip
async def test_tokens_of_a_conversation(
    served: Served, content: Any, more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that its answer counts."""
    monkeypatch.setattr(media_settings, "SHORTEST_VIDEO", 8)
    usage = (await served.post(content, **more)).json()["usage"]
    body = (await served.post(content, "/tokenize", **more)).json()
    (request,) = served.core.requests
    assert (body["tokens"], body["count"]) == (request.prompt_token_ids, usage["prompt_tokens"])
    assert body["prompt_tokens_details"] | {"cached_tokens": 0} == usage["prompt_tokens_details"]
    assert body["token_strs"] is None
