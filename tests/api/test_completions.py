"""POST /v1/completions, as the openai client sees it, with a scripted engine core behind it."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from mini_engine.api.responses import CompletionWriter, LikelyToken, ListedToken, Piece
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import NewRequest
from tests.api.peers import eventually, logprobs_of
from tests.api.serving import MAX_MODEL_LEN, Served, serve, words
from tests.api.test_app import metric

ANSWER = ("a red", " circle", " moving left")


async def complete(served: Served, prompt: Any = "hello", **more: Any) -> Any:
    return await served.openai.completions.create(model="tiny", prompt=prompt, **more)


def encode(processor: MediaProcessor, text: str) -> list[int]:
    return processor.hf_processor.tokenizer(text)["input_ids"]


def by_prompt(processor: MediaProcessor) -> Any:
    """A script that answers each prompt with its own tokens, one by one, and with the number of the choice."""
    first = {}

    def script(request: NewRequest) -> list[list[int]]:
        prompt = request.prompt_token_ids
        number = request.sampling.seed - first.setdefault(tuple(prompt), request.sampling.seed)
        return [[token] for token in prompt] + [encode(processor, str(number))]

    return script


def test_a_text_goes_on(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            succeeded = metric("request_success_total", finished_reason="length")
            answer = await complete(served)
            (choice,) = answer.choices
            assert (choice.text, choice.finish_reason, choice.logprobs) == ("".join(ANSWER), "length", None)
            (request,) = served.core.requests
            assert request.prompt_token_ids == encode(processor, "hello")
            assert request.sampling.max_tokens == 16
            assert answer.id == request.request_id and answer.id.startswith("cmpl-")
            assert (answer.object, answer.model) == ("text_completion", "tiny")
            assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
            assert answer.usage.completion_tokens == sum(map(len, served.core.script(request)))
            assert metric("request_success_total", finished_reason="length") - succeeded == 1

    asyncio.run(scenario())


def test_a_stream(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            stream = await complete(served, stream=True, stream_options={"include_usage": True})
            *chunks, used = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].text for chunk in chunks) == "".join(ANSWER)
            assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            assert used.choices == [] and used.usage.completion_tokens > 0
            assert all(chunk.usage is None for chunk in chunks)
            body = {"model": "tiny", "prompt": "hello", "stream": True}
            response = await served.http.post("/v1/completions", json=body)
            assert response.text.endswith("data: [DONE]\n\n") and "usage" not in response.text
            assert response.headers["x-request-id"] == served.core.requests[1].request_id

    asyncio.run(scenario())


PROMPTS: list[Any] = ["one more", ["one more", "another text", "third"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_choice_is_of_its_prompt(
    processor: MediaProcessor, tmp_path: Path, prompt: Any, as_tokens: bool, stream: bool
) -> None:
    async def scenario() -> None:
        texts = [prompt] if isinstance(prompt, str) else prompt
        token_ids = [encode(processor, text) for text in texts]
        asked = prompt if not as_tokens else token_ids[0] if isinstance(prompt, str) else token_ids
        async with serve(processor, tmp_path, by_prompt(processor)) as served:
            served.core.cached = 3
            options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
            answer = await complete(served, asked, n=2, stream=stream, max_tokens=50, **options)
            got = [""] * 2 * len(texts)
            if stream:
                async for chunk in answer:
                    used = chunk.usage
                    for choice in chunk.choices:
                        got[choice.index] += choice.text
            else:
                assert [choice.index for choice in answer.choices] == list(range(len(got)))
                got, used = [choice.text for choice in answer.choices], answer.usage
            assert got == [f"{text}{number}" for text in texts for number in (0, 1)]
            assert [request.prompt_token_ids for request in served.core.requests] == token_ids
            assert used.prompt_tokens == sum(map(len, token_ids))
            assert used.prompt_tokens_details.cached_tokens == 3 * len(texts)
            engine = served.context.engines.engines[0]
            await eventually(lambda: not engine.requests and not engine.preparing)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            answer = await complete(served, logprobs=2, stream=stream)
            parts = [chunk.choices[0] async for chunk in answer] if stream else [answer.choices[0]]
            text = "".join(part.text for part in parts)
            lists = [part.logprobs for part in parts if part.logprobs]
            tokens = [token for one in lists for token in one.tokens]
            offsets = [offset for one in lists for offset in one.text_offset]
            assert "".join(tokens) == text == "".join(ANSWER)
            assert offsets == [len("".join(tokens[:count])) for count in range(len(tokens))]
            assert {value for one in lists for value in one.token_logprobs} == {-0.25}
            likeliest = [one.logprob for one in logprobs_of(0, 2)[1:]]
            for token, likely in zip(tokens, [each for one in lists for each in one.top_logprobs], strict=True):
                assert likely[token] == -0.25
                assert [value for name, value in likely.items() if name != token] == likeliest

    asyncio.run(scenario())


def test_tokens_that_are_parts_of_a_character() -> None:
    def listed(data: bytes, *likely: bytes) -> ListedToken:
        others = [LikelyToken("?", -2.0, list(each)) for each in likely]
        return ListedToken("?", -1.0, list(data), others)

    writer = CompletionWriter("id", "model", False)

    def written(*tokens: ListedToken) -> dict[str, Any]:
        event = writer.event(Piece(0, "text", None, list(tokens)))
        return json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]

    first = written(listed(b"ab"), listed("é".encode()[:1], "é".encode()[1:]))
    assert (first["tokens"], first["text_offset"]) == (["ab", "bytes:\\xc3"], [0, 2])
    assert first["top_logprobs"] == [{"ab": -1.0}, {"bytes:\\xa9": -2.0, "bytes:\\xc3": -1.0}]
    then = written(listed("é".encode()[1:]), listed(b"!"))
    assert (then["tokens"], then["text_offset"]) == (["bytes:\\xa9", "!"], [2, 3])


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "Missing required parameter: 'prompt'", "prompt"),
    ({"prompt": ""}, "empty", "prompt"),
    ({"prompt": ["a", ""]}, "empty", "prompt"),
    ({"prompt": [10**6]}, "token id 1000000", "prompt"),
    ({"prompt": "a <|image_pad|>"}, "<|image_pad|>", "prompt"),
    ({"prompt": "word " * 700}, f"{MAX_MODEL_LEN}", "prompt"),
    ({"prompt": "a", "max_tokens": MAX_MODEL_LEN}, "Ask for at most", "max_tokens"),
    ({"prompt": "a", "messages": []}, "Unknown parameter: 'messages'", "messages"),
    ({"prompt": "a", "stop_token_ids": [10**6]}, "token id 1000000", "stop_token_ids"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_client(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            for body, says, param in BAD:
                response = await served.http.post("/v1/completions", json={**body, "stream": stream})
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, param), response.text
                assert says in error["message"]
            placeholder = [processor.hf_processor.image_token_id]
            with pytest.raises(openai.BadRequestError, match="placeholder for media"):
                await complete(served, placeholder)
            assert not served.core.requests
            # Null, and what asks for what happens anyway, are taken.
            await complete(served, echo=False, suffix=None, best_of=1, user="me", logprobs=None)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_fails_ends_the_others(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, lambda request: []) as served:
            served.core.hold = True
            asking = asyncio.create_task(complete(served, ["a", "b"], stream=stream))
            await served.core.until(lambda: len(served.core.requests) == 2)
            await served.core.end(served.core.requests[1], "error", "no luck")
            with pytest.raises(openai.InternalServerError, match="no luck"):
                await asking
            await served.core.until(lambda: bool(served.core.finishes))
            assert [finish.request_id for finish in served.core.finishes] == [served.core.requests[0].request_id]

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_prompts(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            served.core.hold = True
            aborted = metric("request_success_total", finished_reason="abort")
            asking = asyncio.create_task(complete(served, ["a", "b"], n=2, stream=stream))
            await served.core.until(lambda: len(served.core.running) == 4)
            if stream:
                await (await asking).close()
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await served.core.until(lambda: len(served.core.finishes) == 4)
            assert {finish.reason for finish in served.core.finishes} == {"abort"}
            await eventually(lambda: metric("request_success_total", finished_reason="abort") - aborted == 2)

    asyncio.run(scenario())
