"""Where a request's time goes: each pause falls to the stage in which it was made, and all of them are the whole."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mini_engine.api import generation, media_loader, timings
from mini_engine.api.media_loader import MediaLoader
from mini_engine.api.timings import RequestClock
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import EngineTimes
from mini_engine.metrics import REGISTRY, stage_seconds
from tests.api import peers
from tests.api.peers import eventually
from tests.api.serving import Served, image, serve, words
from tests.api.test_media_loader import fetch, image_ref, loader

PAUSE = 100.0  # of the test's clock
ANSWER = ("a red", " circle")


def sample(name: str) -> float:
    value = REGISTRY.get_sample_value(f"mini_engine:{name}")
    assert value is not None
    return value


def counts() -> dict[str, float]:
    return {stage: sample(f"{name_of(stage)}_count") for stage in stage_seconds}


def name_of(stage: str) -> str:
    return stage_seconds[stage].describe()[0].name.removeprefix("mini_engine:")


class Clock:
    """Goes when the test says so, and a little at each look, so that nothing takes no time. For all who take times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._now = 1000.0
        self._lock = threading.Lock()  # those who decode look too
        for module in (timings, media_loader, generation, peers):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        with self._lock:
            self._now += 0.001
            return self._now

    def pause(self) -> None:
        with self._lock:
            self._now += PAUSE


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def about(pauses: int) -> Any:
    """So many pauses, and the looks at the clock."""
    return pytest.approx(pauses * PAUSE, abs=PAUSE / 2)


def test_the_stages_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(timings, "time", SimpleNamespace(monotonic=lambda: now))
    before, sums = counts(), {stage: sample(f"{name_of(stage)}_sum") for stage in stage_seconds}
    clock = RequestClock()
    now = 51.0  # 1 s of other
    assert clock.enter("admission") == "other"
    now = 53.0
    clock.enter("fetch")
    now = 56.0
    clock.enter("transport")
    now = 60.0  # 4 s, and the media are wanted again
    assert clock.enter("media_decode") == "transport"
    now = 65.0
    clock.enter("transport")
    clock.move(2.0, "media_decode", "process")
    now = 71.0  # 6 s
    clock.enter("other")
    now = 100.0
    # The engine had accepted the request half a second before this server heard of it.
    clock.end("length", EngineTimes(70.5, 72.0, 75.0, 79.0, 99.25))
    clock.end("abort")
    spent = {
        "admission": 2.0, "fetch": 3.0, "media_decode": 3.0, "process": 2.0, "transport": 9.5,
        "queue": 1.5, "encode": 3.0, "prefill": 4.0, "generation": 20.25, "other": 1.75,
    }  # fmt: skip
    told = clock.timings()
    assert {field: getattr(told, field) for field in told.__struct_fields__} == spent
    assert sum(spent.values()) == 50.0
    assert counts() == {stage: count + 1 for stage, count in before.items()}
    assert {stage: sample(f"{name_of(stage)}_sum") - sums[stage] for stage in stage_seconds} == pytest.approx(
        {stage: spent[stage] for stage in stage_seconds}
    )


def test_sizes_and_pace_of_a_request_are_counted_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("request_prompt_tokens", "request_generation_tokens", "request_time_per_output_token_seconds")
    figures = [f"{name}_{part}" for name in names for part in ("sum", "count")]
    now = 10.0
    monkeypatch.setattr(timings, "time", SimpleNamespace(monotonic=lambda: now))

    def counted(*tokens: tuple[float, int, int]) -> list[float]:
        """What a request adds whose tokens come at these times: so many, of this choice."""
        nonlocal now
        before = [sample(name) for name in figures]
        clock = RequestClock()
        for now, generated, index in tokens:  # noqa: B007 - it is what the clock reads
            clock.tokens(7, generated, index)
        assert [sample(name) for name in figures] == before
        clock.end("stop", EngineTimes(now, now, now, now, now))
        return [sample(name) - old for name, old in zip(figures, before, strict=True)]

    assert counted((11.0, 1, 0), (12.0, 1, 1), (15.0, 2, 0), (16.0, 2, 1)) == pytest.approx([7, 1, 6, 1, 2.0, 1])
    assert counted((17.0, 1, 0)) == pytest.approx([7, 1, 1, 1, 0, 0])


def test_a_request_without_an_answer_is_in_no_histogram() -> None:
    before = counts()
    RequestClock().end("abort")
    assert counts() == before


class SlowDecoders:
    """A loader's decoders, with a pause before each `together` items, which are decoded at once."""

    def __init__(self, loader: MediaLoader, clock: Clock, together: int):
        self._clock = clock
        self._decoders, loader.decoders = loader.decoders, self
        self._barrier = asyncio.Barrier(together)

    async def decode(self, *args: Any) -> Any:
        if await self._barrier.wait() == 0:
            self._clock.pause()
        await self._barrier.wait()
        return await self._decoders.decode(*args)

    def close(self) -> None:
        self._decoders.close()


async def loaded(one: Any, *sides: int) -> tuple[float, float]:
    """Seconds of `media_decode` and `process`."""
    clock = RequestClock()
    items = await fetch(one, [image_ref(number, side) for number, side in enumerate(sides)])
    await one.process(items, clock)
    spent = clock.timings()
    return spent.media_decode, spent.process


@pytest.mark.parametrize("threads", [1, 2])
def test_decoding_and_processing_share_the_wait(processor: MediaProcessor, clock: Clock, threads: int) -> None:
    one = loader(processor, threads)
    SlowDecoders(one, clock, together=threads)
    started = clock.monotonic()
    decode, process = asyncio.run(loaded(one, 56, 57, 58, 59))
    assert decode == about(4 // threads)
    assert 0 < process
    assert decode + process <= clock.monotonic() - started
    one.close()


async def asked(served: Served, **more: Any) -> dict[str, float]:
    response = await served.post(return_timings=True, **more)
    assert response.status_code == 200, response.text
    return response.json()["metrics"]


def test_each_pause_falls_to_its_stage(processor: MediaProcessor, tmp_path: Path, clock: Clock) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, lambda request: []) as served:
            core, before, whole = served.core, counts(), sample("e2e_request_latency_seconds_sum")
            core.hold, core.accepts = True, False
            async with served.context.admission.places(4):
                asking = asyncio.create_task(asked(served, content=[image()], n=2))
                await eventually(lambda: served.context.admission.num_waiting == 1)
                clock.pause()
            await core.until(lambda: bool(core.requests))
            (request,) = core.requests
            sibling = core.running[request.siblings[0].request_id]
            clock.pause()
            await core.accept(request)
            clock.pause()
            await core.output(request, [65])
            clock.pause()
            await core.end(request, "length", tokens=[66])
            await core.output(sibling, [65])
            clock.pause()
            await core.end(sibling, "length")
            spent = await asking
            for stage in ("admission", "transport", "queue", "generation", "other"):
                assert spent[stage] == about(1), stage
            assert (spent["encode"], spent["prefill"]) == (0, 0)
            assert all(0 < spent[stage] < PAUSE / 2 for stage in ("fetch", "media_decode", "process"))
            whole = sample("e2e_request_latency_seconds_sum") - whole
            assert sum(spent.values()) == pytest.approx(whole, abs=1e-5)
            assert counts() == {stage: count + 1 for stage, count in before.items()}

    asyncio.run(scenario())


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_has_them_in_its_last_chunk(processor: MediaProcessor, tmp_path: Path, include_usage: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            options = {"stream_options": {"include_usage": True}} if include_usage else {}
            response = await served.post(stream=True, return_timings=True, n=2, **options)
            *events, done, end = response.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            *others, last = [json.loads(event.removeprefix("data: ")) for event in events]
            assert not any("metrics" in chunk for chunk in others)
            assert ("usage" in last) is include_usage
            assert [choice["finish_reason"] for choice in last["choices"]] == ([] if include_usage else ["length"])
            assert list(last["metrics"]) == [*stage_seconds, "other"]
            assert last["metrics"]["transport"] > 0

    asyncio.run(scenario())


@pytest.mark.parametrize("fields", [{}, {"return_timings": False}, {"return_timings": None}])
@pytest.mark.parametrize("stream", [False, True])
def test_who_does_not_ask_is_not_told(
    processor: MediaProcessor, tmp_path: Path, fields: dict[str, Any], stream: bool
) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            before = counts()
            response = await served.post(stream=stream, **fields)
            assert response.status_code == 200 and "metrics" not in response.text
            assert counts() == {stage: count + 1 for stage, count in before.items()}

    asyncio.run(scenario())


def test_a_stop_string_ends_the_generation(processor: MediaProcessor, tmp_path: Path, clock: Clock) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a")) as served:
            core = served.core
            core.hold = True
            asking = asyncio.create_task(asked(served, stop="red"))
            await core.until(lambda: bool(core.requests))
            clock.pause()
            (red,) = words(processor, " red circle")(core.requests[0])
            await core.output(core.requests[0], red)
            spent = await asking
            assert (spent["generation"], spent["other"]) == (about(1), about(0))

    asyncio.run(scenario())


def test_cached_media_cost_no_decoding(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            served.core.keeps = True
            cold = await asked(served, content=[image()])
            warm = await asked(served, content=[image()])
            assert cold["media_decode"] > 0 < cold["process"]
            assert (warm["media_decode"], warm["process"]) == (0, 0)
            assert cold["fetch"] > 0 < warm["fetch"]

    asyncio.run(scenario())


def test_the_tensors_on_their_way_are_counted(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, *ANSWER)) as served:
            core = served.core
            core.accepts = False
            asking = asyncio.create_task(asked(served, content=[image(), image(112)]))
            await core.until(lambda: bool(core.requests))
            assert sample("ipc_buffered_tensors") == 2
            await core.accept(core.requests[0])
            await asking
            await eventually(lambda: not served.transports[0].held)
            assert sample("ipc_buffered_tensors") == 0 == sample("ipc_buffered_bytes")

    asyncio.run(scenario())
