"""Where a request's time goes: each pause falls to the stage in which it was made, and all of them are the whole."""

from __future__ import annotations

import asyncio
import time

import pytest

from mini_engine.api.timings import RequestClock, Stage
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import EngineTimes
from mini_engine.metrics import stage_seconds
from tests.api.patience import eventually
from tests.api.serving import (
    Counted,
    GatedProcessor,
    Served,
    events_of,
    image,
    media_loader,
    metric,
)
from tests.api.test_media_loader import fetch, image_ref

PAUSE = 0.02  # seconds; each stage has another multiple of it
HISTOGRAMS = {
    stage: histogram.describe()[0].name.removeprefix("mini_engine:") for stage, histogram in stage_seconds.items()
}
COUNTS = [f"{name}_count" for name in HISTOGRAMS.values()]


async def pause(pauses: int) -> None:
    await asyncio.to_thread(time.sleep, pauses * PAUSE)


def test_stages_add_up_to_the_whole() -> None:
    counted, whole = Counted(*COUNTS), Counted("e2e_request_latency_seconds_sum")
    begun = time.monotonic()
    clock = RequestClock()
    stages: list[Stage] = ["other", "admission", "fetch", "transport", "media_decode", "transport"]
    for pauses, stage in enumerate(stages, 1):
        clock.enter(stage)
        time.sleep(pauses * PAUSE)
    assert clock.enter("other") == "transport"
    clock.move(PAUSE, "media_decode", "process")
    left = time.monotonic()
    time.sleep(PAUSE)
    # The engine had accepted the request half a pause before this server heard of it.
    accepted = left - PAUSE / 2
    clock.end("length", EngineTimes(accepted, accepted + 0.001, accepted + 0.003, accepted + 0.006, accepted + 0.010))
    clock.end("abort")
    spent = clock.timings()
    assert [spent[stage] for stage in ("queue", "encode", "prefill", "generation")] == pytest.approx(
        [0.001, 0.002, 0.003, 0.004]
    )
    minima = {"admission": 2, "fetch": 3, "transport": 9.5, "media_decode": 4, "process": 1, "other": 1}
    assert all(spent[stage] >= pauses * PAUSE - 1e-3 for stage, pauses in minima.items()), spent
    total = sum(spent.values())
    assert whole.since() == [pytest.approx(total, abs=1e-4)] and total <= time.monotonic() - begun
    assert counted.since() == [1] * len(COUNTS)


def test_sizes_and_pace_of_a_request_are_counted_at_its_end() -> None:
    names = ("request_prompt_tokens", "request_generation_tokens", "request_time_per_output_token_seconds")
    counted = Counted(*(f"{name}_{part}" for name in names for part in ("sum", "count")))
    clock = RequestClock()
    for generated, index in ((1, 0), (1, 1), (2, 0), (2, 1)):
        clock.tokens(7, generated, index)
        time.sleep(PAUSE)
    assert counted.since() == [0] * 6
    clock.end("stop", EngineTimes(0, 0, 0, 0, 0))
    *sizes, pace, paced = counted.since()
    # Two gaps of two pauses each brought two tokens each.
    assert sizes == [7, 1, 6, 1] and paced == 1 and PAUSE <= pace < 2 * PAUSE
    clock = RequestClock()
    clock.tokens(7, 1)
    clock.end("stop", EngineTimes(0, 0, 0, 0, 0))
    assert counted.since()[-1] == 1, "a single token has no pace"


def test_request_without_an_answer_is_in_no_histogram() -> None:
    counted = Counted(*COUNTS)
    RequestClock().end("abort")
    assert counted.since() == [0] * len(COUNTS)


async def test_wait_for_media_is_divided_in_the_proportion_of_decoding_and_processing(
    processor: MediaProcessor,
) -> None:
    gated, clock = GatedProcessor(processor), RequestClock()
    one = media_loader(gated)
    loading = asyncio.create_task(one.process(await fetch(one, [image_ref()]), clock))
    await eventually(lambda: gated.inside == 1)  # it is decoded
    await pause(10)
    gated.door.set()
    await loading
    spent = clock.timings()
    assert spent["media_decode"] > 0 and spent["process"] >= 9 * PAUSE
    one.close()


async def test_each_pause_falls_to_its_stage(served: Served) -> None:
    core, whole, counted = served.core, Counted("e2e_request_latency_seconds_sum"), Counted(*COUNTS)
    core.hold, core.accepts = True, False
    served.says()

    async with served.context.admission.places(4):
        asking = served.asking([image()], n=2, return_timings=True)
        await eventually(lambda: served.context.admission.num_waiting == 1)
        await pause(2)
    request = await core.has_requests()
    sibling = core.running[request.siblings[0].request_id]
    assert metric("ipc_buffered_tensors") == 1
    await pause(3)
    await core.accept(request)
    await pause(4)
    await core.output(request, [65])
    await pause(5)
    await core.end(request, "length", tokens=[66])
    await core.output(sibling, [65])
    await pause(6)
    await core.end(sibling, "length")
    spent = (await asking).json()["metrics"]
    for pauses, stage in enumerate(("admission", "transport", "queue", "generation", "other"), 2):
        assert spent[stage] >= pauses * PAUSE - 1e-3, stage
    assert (spent["encode"], spent["prefill"]) == (0, 0)
    assert all(spent[stage] > 0 for stage in ("fetch", "media_decode", "process"))
    assert whole.since() == [pytest.approx(sum(spent.values()), abs=1e-4)]
    assert counted.since() == [1] * len(COUNTS)
    await eventually(served.at_rest)
    assert metric("ipc_buffered_tensors") == 0 == metric("ipc_buffered_bytes")


async def test_stop_string_ends_the_generation(served: Served) -> None:
    served.says("a")
    served.core.hold = True
    asking = served.asking(stop="red", return_timings=True)
    request = await served.core.has_requests()
    await pause(5)
    await served.core.output(request, served.encode(" red circle"))
    assert (await asking).json()["metrics"]["generation"] >= 4 * PAUSE


async def test_timings_are_there_if_they_are_asked_for(served: Served) -> None:
    counted = Counted(*COUNTS)
    for fields in ({}, {"return_timings": False}, {"return_timings": None}):
        for stream in (False, True):
            assert "metrics" not in (await served.post(stream=stream, **fields)).text
    assert counted.since() == [6] * len(COUNTS)
    *others, last = events_of(await served.post(stream=True, return_timings=True, n=2))
    assert not any("metrics" in chunk for chunk in others)
    assert list(last["metrics"]) == [*stage_seconds, "other"]
