"""Several choices, logprobs, stops, cached tokens, media budgets and cache resets, as clients see them."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from mini_engine.api import engine_client, operations
from mini_engine.api.errors import shutting_down
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import ControlReply, EngineCounters, Figures, NewRequest, SamplingParams
from tests.api.patience import PATIENCE
from tests.api.peers import STATS, Calls, eventually, logprobs_of
from tests.api.serving import LIMITS, Served, hang_up, image, serve, words
from tests.api.test_app import metric


def by_seed(processor: MediaProcessor, texts: list[list[str]]) -> Any:
    """A script that answers the request with seed i with the i-th texts."""
    encode = processor.hf_processor.tokenizer.backend_tokenizer.encode
    return lambda request: [encode(text).ids for text in texts[request.sampling.seed]]


TEXTS = [["a red", " circle"], ["the blue", " square", " stands"], ["moving"]]


@pytest.mark.parametrize("stream", [False, True])
def test_choices(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, by_seed(processor, TEXTS)) as served:
            served.core.cached = 16
            options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
            answer = await served.ask([image()], n=3, seed=0, stream=stream, stop="square", **options)
            texts, reasons, roles = ["", "", ""], [None] * 3, [0, 0, 0]
            if stream:
                chunks = [chunk async for chunk in answer]
                used = chunks.pop().usage
                for chunk in chunks:
                    (choice,) = chunk.choices
                    assert reasons[choice.index] is None
                    texts[choice.index] += choice.delta.content or ""
                    reasons[choice.index] = choice.finish_reason
                    roles[choice.index] += choice.delta.role == "assistant"
                assert roles == [1, 1, 1]
            else:
                assert [choice.index for choice in answer.choices] == [0, 1, 2]
                texts = [choice.message.content for choice in answer.choices]
                reasons = [choice.finish_reason for choice in answer.choices]
                used = answer.usage
            assert texts == ["a red circle", "the blue ", "moving"]
            assert reasons == ["length", "stop", "length"]
            (request,) = served.core.requests
            assert [sibling.request_id for sibling in request.siblings] == [f"{request.request_id}-{i}" for i in (1, 2)]
            assert [sibling.seed for sibling in request.siblings] == [1, 2]
            assert len(served.transports[0].sent) == 1
            assert used.prompt_tokens == len(request.prompt_token_ids)
            assert used.prompt_tokens_details.cached_tokens == 16
            generated = [sum(map(len, by_seed(processor, TEXTS)(request_of(seed)))) for seed in (0, 2)]
            assert used.completion_tokens > sum(generated)
            await eventually(lambda: not served.context.engines.engines[0].requests)

    asyncio.run(scenario())


def request_of(seed: int) -> NewRequest:
    return NewRequest("r", [], SamplingParams(1, seed))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_choices(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            served.core.hold = True
            _, writer = await served.connect(stream=stream, n=3)
            await served.core.until(lambda: len(served.core.running) == 3)
            await hang_up(writer)
            await served.core.until(lambda: len(served.core.finishes) == 3)
            assert {finish.reason for finish in served.core.finishes} == {"abort"}
            await eventually(lambda: not served.context.engines.engines[0].requests)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red", " circ", "le 🎈", " left", " x")) as served:
            answer = await served.ask(logprobs=True, top_logprobs=2, stop=["left"], stream=stream)
            if stream:
                chunks = [chunk async for chunk in answer]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                listed = [
                    one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content
                ]
            else:
                text = answer.choices[0].message.content
                listed = answer.choices[0].logprobs.content
            assert text == "a red circle 🎈 "
            assert b"".join(bytes(one.bytes) for one in listed).startswith(text.encode())
            assert "".join(one.token for one in listed).startswith("a red circle ")
            assert len(listed) < sum(map(len, served.core.script(served.core.requests[0])))
            assert {one.logprob for one in listed} == {-0.25}
            _, *likeliest = logprobs_of(0, 2)
            for one in listed:
                assert [other.logprob for other in one.top_logprobs] == [other.logprob for other in likeliest]

            plain = await served.ask()
            assert plain.choices[0].logprobs is None
            assert served.core.requests[1].sampling.logprobs is None

    asyncio.run(scenario())


async def stopped_at(served: Served, tail: int, **fields: Any) -> tuple[str, int]:
    """The answer's text and length when the engine stops at token `tail`."""
    served.core.hold = True
    count = len(served.core.requests)
    asking = asyncio.create_task(served.ask(extra_body={"stop_token_ids": [tail], **fields}))
    await served.core.until(lambda: len(served.core.requests) > count)
    await served.core.end(served.core.requests[-1], "stop", tokens=[tail])
    answer = await asking
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content, answer.usage.completion_tokens


def test_a_stop_token_shows_where_it_is_asked_for(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        tokenizer = processor.hf_processor.tokenizer
        (x,), (end,) = (tokenizer.encode(text, add_special_tokens=False) for text in ("x", "<|im_end|>"))
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            count = len(served.core.script(request_of(0))[0]) + 1
            assert await stopped_at(served, x) == ("a red", count)
            assert await stopped_at(served, x, include_stop_str_in_output=True) == ("a redx", count)
            assert await stopped_at(served, end, skip_special_tokens=False) == ("a red", count)
            shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
            assert await stopped_at(served, end, **shown) == ("a red<|im_end|>", count)
            assert await stopped_at(served, end, include_stop_str_in_output=True) == ("a red", count)

    asyncio.run(scenario())


def test_fields_that_the_core_gets(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            await served.ask([image(), image()], extra_body={"priority": -3, "cache_salt": "mine"})
            (request,) = served.core.requests
            assert (request.priority, request.cache_salt, request.siblings) == (-3, "mine", [])
            first, second = (item.media_hash for item in request.media)
            assert first == second and len(first) == 16

    asyncio.run(scenario())


def test_media_beyond_the_budget(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            with pytest.raises(openai.BadRequestError, match=r"--encoder-cache-tokens 50\b") as caught:
                await served.ask([image(140), image(141)])
            assert caught.value.code == "media_too_large"
            assert served.core.requests == []
            await served.ask([image(140), image(140)])  # the same twice is encoded once
            assert sum(item.num_tokens for item in served.core.requests[0].media) > LIMITS.max_prompt_media_tokens

    asyncio.run(scenario())


def test_token_ids_are_checked_before_media_are_loaded(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            decodes = metric("media_decodes_total")
            with pytest.raises(openai.BadRequestError, match="token id 99999 out of range"):
                await served.ask([image()], logit_bias={"99999": 1})
            assert metric("media_decodes_total") == decodes

    asyncio.run(scenario())


def test_resetting_the_caches(processor: MediaProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            assert (await served.http.post("/reset_caches")).status_code == 200
            assert len(served.core.controls["reset_caches"]) == 1
            served.core.replies_to.discard("reset_caches")
            monkeypatch.setattr(operations, "RESET_SECONDS", 0.05)
            response = await served.http.post("/reset_caches")
            assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
            served.context.engines.peer_gone("core 0")
            response = await served.http.post("/reset_caches")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")

    asyncio.run(scenario())


def test_the_engines_figures_are_asked_for_when_the_metrics_are_read(
    processor: MediaProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "FIGURES_SECONDS", PATIENCE)

    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            hits = metric("prefix_cache_hits_total", engine="0")
            served.core.counters = EngineCounters(10, 4, 0, 0, 0)
            served.core.replies_to.discard("figures")
            calls = Calls(served.context.engines, "refresh_figures")
            both = [asyncio.create_task(served.http.get("/metrics")) for _ in range(2)]
            await eventually(lambda: calls.begun == 2 and bool(served.core.controls["figures"]))
            await eventually(lambda: len(served.core.controls["figures"]) == 2)
            first, second = served.core.controls["figures"]
            await served.core.tell(ControlReply(first, Figures(STATS, served.core.counters)))
            await served.core.tell(ControlReply(second, Figures(STATS, EngineCounters())))
            for answer in await asyncio.gather(*both):
                assert f'mini_engine:prefix_cache_hits_total{{engine="0"}} {hits + 4}' in answer.text
            served.core.replies_to.add("figures")
            assert (await served.http.get("/metrics")).status_code == 200
            assert metric("prefix_cache_hits_total", engine="0") == hits + 2 * 4

    asyncio.run(scenario())


def test_the_metrics_can_be_read_though_an_engine_is_silent_or_gone(
    processor: MediaProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "FIGURES_SECONDS", 0.2)

    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            served.core.replies_to.discard("figures")
            assert "mini_engine:num_requests_running" in (await served.http.get("/metrics")).text
            served.context.engines.stop(shutting_down())
            assert "mini_engine:num_requests_running" in (await served.http.get("/metrics")).text

    asyncio.run(scenario())
