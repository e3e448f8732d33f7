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
from tests.support.processes import descriptors, eventually, memory, tcp_sockets
from tests.support.running_server import GAUGES, RunningServer, total

SURVIVOR = "api 1"


def disturb(server: RunningServer, questions: list[Question], over: threading.Event) -> int:
    """Leave at random moments, and send bad media. Returns how many of these were refused."""
    dice, refused = random.Random(1), 0
    while not over.is_set():
        with contextlib.suppress(OSError, http.client.HTTPException):  # the API server that got it is dead
            leaving = ClientRequest(server, None, dice.choice(questions), stream=True, max_tokens=500, ignore_eos=True)
            time.sleep(dice.random() ** 2)
            leaving.hang_up()
            url = "data:video/mp4;base64,AAAAIGZ0eXBpc29t"
            bad = ClientRequest(server, None, Question("What is it?", "", [("video_url", url)]))
            refused += bad.response().status == 400
            bad.hang_up()
    return refused


@pytest.mark.slow
def test_memory_and_descriptors_do_not_grow_under_load():
    minutes, kill_seconds = float(os.environ.get("SOAK_MINUTES", "2")), 30
    questions = [*map(ask_small, range(40_000, 40_060)), *map(ask_image, range(40_000, 40_020))]
    kills: list[tuple[float, float]] = []  # from a death until no more connections are queued at the dead server
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}  # times and values
    # Caches so small that they are full, and all of their memory was touched, after some seconds.
    caches = "--mm-processor-cache-gb 0.01 --encoder-cache-tokens 4096 --num-gpu-blocks-override 600".split()
    with RunningServer("--api-server-count", "2", *caches) as server, ThreadPoolExecutor(1) as pool:
        server.client.close()
        listener = (server.address[1], 0)  # of each API server; the kernel queues connections at it
        with Load(server, questions) as load:
            disturbing = pool.submit(disturb, server, questions, over := threading.Event())
            try:
                end, next_kill = time.monotonic() + 60 * minutes, time.monotonic() + kill_seconds
                while (now := time.monotonic()) < end:
                    shown, pids = server.metrics(SURVIVOR), server.pids()
                    if now > next_kill and "api 0" in pids and server.log.count("replacement ready") == len(kills):
                        os.kill(pids["api 0"], signal.SIGKILL)
                        eventually(lambda: [socket[:2] for socket in tcp_sockets()].count(listener) == 1)
                        kills.append((now, time.monotonic()))
                        next_kill = now + kill_seconds
                    values = {("gauge", name): total(shown, name) for name in GAUGES}
                    for name in (SURVIVOR, "core 0", "worker 0.0", "supervisor"):
                        values |= {(name, part): memory(pids[name], part) for part in ("RssAnon", "RssShmem")}
                        values[name, "descriptors"] = descriptors(pids[name])
                    for key, value in values.items():
                        measured.setdefault(key, []).append((time.monotonic(), value))
                    time.sleep(2)
            finally:
                over.set()
        assert disturbing.result() and len(kills) >= max(1, int(minutes))
        assert load.tally()["right"] > 10 * minutes
        for outcome in load.outcomes:
            by_a_kill = any(outcome.begun <= left and kill <= outcome.ended for kill, left in kills)
            assert outcome.kind == "right" or (outcome.kind == "cut" and by_a_kill), outcome

        for (name, kind), points in measured.items():
            mean = statistics.mean(value for _, value in points)
            times, values = zip(*points[len(points) // 2 :], strict=True)
            growth = statistics.linear_regression(times, values).slope * (times[-1] - times[0])
            print(f"{name} {kind}: {growth:+g} at {mean:g}")
            # The standard error of `growth`, were the values independent of the time: chance makes four of them.
            noise = statistics.stdev(values) * (12 / len(values)) ** 0.5
            # Anonymous memory in parts of what there is; of shared memory less than the stores of the API servers that
            # are killed in that time.
            limit = {"RssAnon": 0.05 * mean, "RssShmem": 4 << 20, "descriptors": 3}.get(kind, 4 * noise)
            assert growth <= limit, (name, kind)
        eventually(lambda: server.log.count("replacement ready") == len(kills), 90)
        server.assert_at_rest(SURVIVOR)
