"""Minutes of mixed load, SOAK_MINUTES of them (2 unless it is set): aborts, bad media, and an API server that is killed
every half a minute. Every answer is right, errors are where they belong, and nothing grows."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.asked import Asked, ask_image, ask_small
from tests.e2e.asking import Asking
from tests.e2e.processes import descriptors, memory
from tests.e2e.running_server import GAUGES, RunningServer, total
from tests.e2e.waiting import eventually
from tests.faults.load import Outcome, ask

MINUTES = float(os.environ.get("SOAK_MINUTES", "2"))
CLIENTS = 4
ABORTED, BAD = 0.20, 0.05  # of all requests
KILL_SECONDS = 30
SAMPLE_SECONDS = 2
VICTIM, SURVIVOR = "api 0", "api 1"
LASTING = (SURVIVOR, "core 0", "worker 0.0", "supervisor")
# By the slope, over the second half of the time: anonymous memory in parts of what there is; of shared memory less than
# the stores of the API servers that are killed in that time.
MAX_GROWTH, MAX_SHARED_GROWTH, MAX_MORE_DESCRIPTORS = 0.05, 4 << 20, 3
# Connections queued at a dead server are reset a moment after its death, when its socket is closed.
CUT_SECONDS = 2
BROKEN = Asked("What is it?", "", [("video_url", "data:video/mp4;base64,AAAAIGZ0eXBpc29t")])
FLAGS = [  # caches so small that they are full, and all of their memory was touched, after some seconds
    "--api-server-count", "2", "--mm-processor-cache-gb", "0.01", "--encoder-cache-tokens", "4096",
    "--num-gpu-blocks-override", "600",
]  # fmt: skip

Points = list[tuple[float, float]]  # times and values


def growth(points: Points) -> float:
    """By how much a value grows over the second half of the time, by the slope of its regression line."""
    times, values = zip(*points[len(points) // 2 :], strict=True)
    return statistics.linear_regression(times, values).slope * (times[-1] - times[0])


def noise(points: Points) -> float:
    """The standard error of `growth`, were the values independent of the time: chance makes four of them of nothing."""
    values = [value for _, value in points[len(points) // 2 :]]
    return statistics.stdev(values) * (12 / len(values)) ** 0.5


class Soak:
    """The clients, the kills, and what is measured meanwhile."""

    def __init__(self, server: RunningServer):
        self.server = server
        self.over = threading.Event()
        self.outcomes: list[Outcome] = []
        self.num_bad = 0
        self.kills: list[float] = []
        self.measured: dict[tuple[str, str], Points] = {}
        self.asked = [ask_small(40_000 + number) for number in range(60)]
        self.asked += [ask_image(40_000 + number) for number in range(20)]

    def run(self) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self.run_client, random.Random(number)) for number in range(CLIENTS)]
            try:
                end = time.monotonic() + 60 * MINUTES
                last_kill = time.monotonic()
                while time.monotonic() < end and not any(client.done() for client in clients):
                    if time.monotonic() - last_kill > KILL_SECONDS:
                        self.kill()
                        last_kill = time.monotonic()
                    self.measure()
                    time.sleep(SAMPLE_SECONDS)
            finally:
                self.over.set()
            for client in clients:
                client.result()

    def run_client(self, dice: random.Random) -> None:
        while not self.over.is_set():
            kind, one = dice.random(), dice.choice(self.asked)
            if kind < ABORTED:
                self.abort(dice, one)
            elif kind < ABORTED + BAD:
                try:
                    self.outcomes.append(ask(self.server, BROKEN))
                except AssertionError as error:  # a status that a right question never gets
                    assert str(error).startswith("400 "), error
                    self.num_bad += 1
            else:
                self.outcomes.append(ask(self.server, one, stream=dice.random() < 0.5))

    def abort(self, dice: random.Random, one: Asked) -> None:
        api = dice.choice((VICTIM, SURVIVOR))
        try:
            asking = Asking(self.server, api, one, stream=True, max_tokens=500, ignore_eos=True)
        except (AssertionError, OSError):
            return  # the server of its choice is dead
        time.sleep(dice.random() ** 2)
        asking.hang_up()

    def kill(self) -> None:
        """One API server, if the last successor serves already."""
        victim = self.server.pids().get(VICTIM)
        if self.server.log.count("replacement ready") == len(self.kills) and victim:
            self.kills.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

    def measure(self) -> None:
        pids, shown, now = self.server.pids(), self.server.metrics(SURVIVOR), time.monotonic()
        values: dict[tuple[str, str], float] = {("gauge", name): total(shown, name) for name in GAUGES}
        for name in LASTING:
            values |= {(name, part): memory(pids[name], part) for part in ("RssAnon", "RssShmem")}
            values[name, "descriptors"] = descriptors(pids[name])
        for key, value in values.items():
            self.measured.setdefault(key, []).append((now, value))


@pytest.mark.slow
def test_memory_and_descriptors_do_not_grow_under_load():
    with RunningServer(*FLAGS, own_dev_shm=True) as server:
        server.client.close()
        soak = Soak(server)
        soak.run()
        assert len(soak.kills) >= max(1, int(MINUTES)) and soak.num_bad
        assert sum(outcome.kind == "right" for outcome in soak.outcomes) > 10 * MINUTES
        for outcome in soak.outcomes:
            by_a_kill = any(outcome.begun - CUT_SECONDS <= kill <= outcome.ended for kill in soak.kills)
            assert outcome.kind == "right" or (outcome.kind == "cut" and by_a_kill), outcome

        for (name, what), points in soak.measured.items():
            mean = statistics.mean(value for _, value in points)
            print(f"{name} {what}: {growth(points):+g} at {mean:g}")
            most = {
                "RssAnon": MAX_GROWTH * mean, "RssShmem": MAX_SHARED_GROWTH, "descriptors": MAX_MORE_DESCRIPTORS,
            }.get(what, 4 * noise(points))  # fmt: skip
            assert growth(points) <= most, (name, what)
        eventually(lambda: server.log.count("replacement ready") == len(soak.kills), 90)
        server.assert_at_rest(SURVIVOR)
        server.assert_dev_shm_never_written()
