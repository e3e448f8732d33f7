"""Where a request's time goes: each pause falls to the stage in which it was made, and all of them are the whole."""

import asyncio
import time

import pytest

from mini_engine.metrics import stage_seconds
from mini_engine.protocol.request_clock import RequestClock
from tests.support.patience import eventually
from tests.support.peers import as_requests
from tests.support.serving import Counted, Served, events_of, image, metric

PAUSE = 0.02  # seconds; each stage has another multiple of it
COUNTS = [f"{each.describe()[0].name}_count".removeprefix("mini_engine:") for each in stage_seconds.values()]


async def pause(pauses: int) -> None:
    await asyncio.to_thread(time.sleep, pauses * PAUSE)


async def test_sizes_and_pace_of_a_request_are_counted_at_its_end(served: Served) -> None:
    names = ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens")
    names += ("request_params_max_tokens", "request_time_per_output_token_seconds")
    counted = Counted(*(f"{name}_{part}" for name in names for part in ("sum", "count")))
    first = Counted("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count")
    arrived, begun = Counted("time_to_first_token_seconds_count", "inter_token_latency_seconds_count"), time.monotonic()
    served.says()
    served.core.hold = True
    asking = served.asking(n=2, max_tokens=8)
    request = await served.core.has_requests()
    samples = [request, *as_requests(request)]
    await pause(2)
    sent = time.monotonic()
    for tokens, gaps in ([65], 0), ([65, 66], 4):  # the first choice gets one more at its end
        for sample in samples:
            await served.core.output(sample, tokens)
        await eventually(lambda gaps=gaps: arrived.since() == [1, gaps])
        await pause(2)
    assert counted.since() == [0] * 10
    seconds, count = first.since()
    assert count == 1 and 2 * PAUSE <= seconds <= time.monotonic() - begun - 4 * PAUSE
    await served.core.end(samples[1], "length")
    await served.core.end(samples[0], "length", tokens=[67])
    await asking
    *sizes, pace, paced = counted.since()
    # After the first token of each choice, a gap of two pauses brought two tokens.
    assert sizes == [len(request.prompt_token_ids), 1, 7, 1, 4, 1, 8, 1]
    assert paced == 1 and PAUSE <= pace <= (time.monotonic() - sent) / 2 - PAUSE


async def test_each_pause_falls_to_its_stage(served: Served) -> None:
    core, whole, counted = served.core, Counted("e2e_request_latency_seconds_sum"), Counted(*COUNTS)
    core.hold, core.accepts = True, False
    served.says()

    served.gate.door.clear()
    async with served.context.media_permits.hold(4, RequestClock(), b""):
        asking = served.asking([image()], n=2, return_timings=True)
        await eventually(lambda: not served.context.media_permits.turns.num_free)
        await pause(2)
    await eventually(lambda: served.gate.inside == 1)
    await pause(7)
    served.gate.door.set()
    request = await core.has_requests()
    child = core.running[request.children[0].request_id]
    assert metric("ipc_buffered_tensors") == 1
    await pause(3)
    await core.accept(request)
    await pause(4)
    await core.output(request, [65])
    await pause(5)
    await core.end(request, "length", tokens=[66])
    await core.output(child, [65])
    await pause(6)
    await core.end(child, "length")
    spent = (await asking).json()["metrics"]
    for pauses, stage in enumerate(("admission", "transport", "queue", "generation", "other"), 2):
        assert spent[stage] >= pauses * PAUSE - 1e-3, stage
    assert spent["process"] >= 7 * PAUSE - 1e-3
    assert (spent["encode"], spent["prefill"]) == (0, 0)
    assert spent["fetch"] > 0 and spent["media_decode"] > 0
    assert whole.since() == [pytest.approx(sum(spent.values()), abs=1e-4)]
    assert counted.since() == [1] * len(COUNTS)
    await eventually(served.at_rest)
    assert metric("ipc_buffered_tensors") == 0 == metric("ipc_buffered_bytes")


async def test_timings_are_there_if_they_are_asked_for(served: Served) -> None:
    counted = Counted(*COUNTS)
    for fields in ({}, {"return_timings": False}, {"return_timings": None}):
        for stream in (False, True):
            assert "metrics" not in (await served.post(stream=stream, **fields)).text
    assert counted.since() == [6] * len(COUNTS)
    *others, last = events_of(await served.post(stream=True, return_timings=True, n=2))
    assert not any("metrics" in chunk for chunk in others)
    assert list(last["metrics"]) == [*stage_seconds, "other"]
