"""Minutes of mixed load, SOAK_MINUTES of them (2 unless it is set): aborts, bad media, and an API server that is killed
every half a minute. Every answer is right, errors are where they belong, and nothing grows."""

import contextlib
import http.client
import os
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.load import Load
from tests.support.client import ClientRequest, Question, ask_image, ask_small
from tests.support.processes import descriptors, eventually, memory
from tests.support.running_server import GAUGES, RunningServer, total

MINUTES = float(os.environ.get("SOAK_MINUTES", "2"))
KILL_SECONDS = 30
SAMPLE_SECONDS = 2
VICTIM, SURVIVOR = "api 0", "api 1"
LASTING = (SURVIVOR, "core 0", "worker 0.0", "supervisor")
# By the slope, over the second half of the time: anonymous memory in parts of what there is; of shared memory less than
# the stores of the API servers that are killed in that time.
MAX_GROWTH, MAX_SHARED_GROWTH, MAX_MORE_DESCRIPTORS = 0.05, 4 << 20, 3
BROKEN = Question("What is it?", "", [("video_url", "data:video/mp4;base64,AAAAIGZ0eXBpc29t")])
FLAGS = [  # caches so small that they are full, and all of their memory was touched, after some seconds
    "--api-server-count", "2", "--mm-processor-cache-gb", "0.01", "--encoder-cache-tokens", "4096",
    "--num-gpu-blocks-override", "600",
]  # fmt: skip

Points = list[tuple[float, float]]  # times and values


def growth(points: Points) -> float:
    """By how much a value grows over the second half of the time, by the slope of its regression line."""
    times, values = zip(*points[len(points) // 2 :], strict=True)
    return statistics.linear_regression(times, values).slope * (times[-1] - times[0])


def measure(server: RunningServer, measured: dict[tuple[str, str], Points]) -> None:
    pids, shown, now = server.pids(), server.metrics(SURVIVOR), time.monotonic()
    values: dict[tuple[str, str], float] = {("gauge", name): total(shown, name) for name in GAUGES}
    for name in LASTING:
        values |= {(name, part): memory(pids[name], part) for part in ("RssAnon", "RssShmem")}
        values[name, "descriptors"] = descriptors(pids[name])
    for key, value in values.items():
        measured.setdefault(key, []).append((now, value))


def disturb(server: RunningServer, questions: list[Question], over: threading.Event) -> int:
    """Leave at random moments, and send bad media. Returns how many of these were refused."""
    dice, refused = random.Random(1), 0
    while not over.is_set():
        with contextlib.suppress(OSError, http.client.HTTPException):  # the API server that got it is dead
            leaving = ClientRequest(server, None, dice.choice(questions), stream=True, max_tokens=500, ignore_eos=True)
            time.sleep(dice.random() ** 2)
            leaving.hang_up()
            bad = ClientRequest(server, None, BROKEN)
            refused += bad.response().status == 400
            bad.hang_up()
    return refused


@pytest.mark.slow
def test_memory_and_descriptors_do_not_grow_under_load():
    questions = [*map(ask_small, range(40_000, 40_060)), *map(ask_image, range(40_000, 40_020))]
    kills: list[tuple[float, float]] = []  # from a death until no more connections are queued at the dead server
    measured: dict[tuple[str, str], Points] = {}
    over = threading.Event()
    with RunningServer(*FLAGS) as server, ThreadPoolExecutor(1) as pool:
        server.client.close()
        with Load(server, questions) as load:
            disturbing = pool.submit(disturb, server, questions, over)
            try:
                end, next_kill = time.monotonic() + 60 * MINUTES, time.monotonic() + KILL_SECONDS
                while (now := time.monotonic()) < end:
                    victim = server.pids().get(VICTIM)
                    if now > next_kill and victim and server.log.count("replacement ready") == len(kills):
                        os.kill(victim, signal.SIGKILL)
                        eventually(lambda: server.num_listeners() == 1)
                        kills.append((now, time.monotonic()))
                        next_kill = now + KILL_SECONDS
                    measure(server, measured)
                    time.sleep(SAMPLE_SECONDS)
            finally:
                over.set()
        assert disturbing.result() and len(kills) >= max(1, int(MINUTES))
        assert load.tally()["right"] > 10 * MINUTES
        for outcome in load.outcomes:
            by_a_kill = any(outcome.begun <= left and kill <= outcome.ended for kill, left in kills)
            assert outcome.kind == "right" or (outcome.kind == "cut" and by_a_kill), outcome

        for (name, kind), points in measured.items():
            mean = statistics.mean(value for _, value in points)
            print(f"{name} {kind}: {growth(points):+g} at {mean:g}")
            # The standard error of `growth`, were the values independent of the time: chance makes four of them.
            values = [value for _, value in points[len(points) // 2 :]]
            noise = statistics.stdev(values) * (12 / len(values)) ** 0.5
            limits = {"RssAnon": MAX_GROWTH * mean, "RssShmem": MAX_SHARED_GROWTH, "descriptors": MAX_MORE_DESCRIPTORS}
            assert growth(points) <= limits.get(kind, 4 * noise), (name, kind)
        eventually(lambda: server.log.count("replacement ready") == len(kills), 90)
        server.assert_at_rest(SURVIVOR)
