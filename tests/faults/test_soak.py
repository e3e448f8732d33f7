"""Minutes of mixed load, SOAK_MINUTES of them (2 unless it is set): aborts, bad media, and an API server that is killed
every half a minute. Every answer is right, errors are where they belong, and nothing grows."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter

import pytest

from tests.e2e.asked import Asked, ask_image, ask_small
from tests.e2e.barriers import Inside, eventually
from tests.e2e.held import GAUGES, assert_nothing_held, descriptors, memory, samples, total
from tests.e2e.pinned import Asking
from tests.e2e.running_server import RunningServer
from tests.faults.load import Outcome, ask

MINUTES = float(os.environ.get("SOAK_MINUTES", "2"))
CLIENTS = 4
ABORTED, BAD = 0.20, 0.05  # of all requests
KILL_SECONDS = 30
SAMPLE_SECONDS = 2
VICTIM, SURVIVOR = "mini-engine: api 0", "mini-engine: api 1"
LASTING = (SURVIVOR, "mini-engine: core 0", "mini-engine: worker 0.0", "supervisor")
MAX_GROWTH = 0.05  # of anonymous memory, by the slope, over all the time that is looked at
# Of shared memory: less than the stores of the API servers that are killed in that time.
MAX_SHARED_GROWTH = 4 << 20
MAX_MORE_DESCRIPTORS = 3
# Connections in line at a dead server are reset a moment after its death, when its socket is closed.
CUT_SECONDS = 2
BROKEN = Asked("What is it?", "", [("video_url", "data:video/mp4;base64,AAAAIGZ0eXBpc29t")])
FLAGS = [  # caches so small that they are full, and all of their memory was touched, after some seconds
    "--api-server-count", "2", "--mm-processor-cache-gb", "0.01", "--encoder-cache-tokens", "4096",
    "--num-gpu-blocks-override", "600",
]  # fmt: skip


@dataclasses.dataclass
class Sample:
    """What a process holds at a moment."""

    at: float
    anonymous: int  # bytes
    shared: int  # bytes, of memory without a name that is mapped and was touched
    descriptors: int


class Soak:
    """The clients and what they have seen."""

    def __init__(self, server: RunningServer):
        self.server = server
        self.over = threading.Event()
        self.outcomes: list[tuple[str, Outcome]] = []
        self.kills: list[float] = []
        self.samples: dict[str, list[Sample]] = {title: [] for title in LASTING}
        self.gauges: dict[str, list[tuple[float, float]]] = {name: [] for name in GAUGES}
        self.failures: list[BaseException] = []
        self.asked = [ask_small(40_000 + number) for number in range(60)]
        self.asked += [ask_image(40_000 + number) for number in range(20)]

    def client(self, number: int) -> None:
        try:
            dice = random.Random(number)
            while not self.over.is_set():
                self.one_request(dice)
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.failures.append(error)

    def one_request(self, dice: random.Random) -> None:
        kind, one = dice.random(), dice.choice(self.asked)
        if kind < ABORTED:
            title = dice.choice((VICTIM, SURVIVOR))
            try:
                asking = Asking(self.server, title, one, stream=True, max_tokens=500, ignore_eos=True)
            except (AssertionError, OSError):
                return  # the server of its choice is dead
            time.sleep(dice.random() ** 2)
            asking.hang_up()
        elif kind < ABORTED + BAD:
            begun = time.monotonic()
            try:
                outcome = ask(self.server, BROKEN)
            except AssertionError as error:  # a status that a right question never gets
                assert str(error).startswith("400 "), error
                outcome = Outcome("right", begun, time.monotonic())
            self.outcomes.append(("bad media", outcome))
        else:
            self.outcomes.append(("question", ask(self.server, one, stream=dice.random() < 0.5)))

    def kill(self) -> None:
        """One API server, if the last successor serves already."""
        victim = self.server.pids().get(VICTIM)
        if self.server.log.count("replacement ready") == len(self.kills) and victim:
            self.kills.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

    def sample(self) -> None:
        pids = self.server.pids()
        for title, taken in self.samples.items():
            anonymous, shared = (memory(pids[title], name) for name in ("RssAnon", "RssShmem"))
            taken.append(Sample(time.monotonic(), anonymous, shared, descriptors(pids[title])))
        figures, now = samples(self.server, SURVIVOR), time.monotonic()
        for name, points in self.gauges.items():
            points.append((now, total(figures, name)))

    def run(self) -> None:
        clients = [threading.Thread(target=self.client, args=(number,)) for number in range(CLIENTS)]
        for thread in clients:
            thread.start()
        end = time.monotonic() + 60 * MINUTES
        last_kill = time.monotonic()
        while time.monotonic() < end and not self.failures:
            if time.monotonic() - last_kill > KILL_SECONDS:
                self.kill()
                last_kill = time.monotonic()
            self.sample()
            time.sleep(SAMPLE_SECONDS)
        self.over.set()
        for thread in clients:
            thread.join()
        if self.failures:
            raise self.failures[0]


Points = list[tuple[float, float]]  # times and values


def points(taken: list[Sample], of: str) -> Points:
    return [(sample.at, getattr(sample, of)) for sample in taken]


def growth(points: Points) -> float:
    """By how much a figure grows over the second half of the time, by the slope of its regression line."""
    times, values = zip(*points[len(points) // 2 :], strict=True)
    return statistics.linear_regression(times, values).slope * (times[-1] - times[0])


def noise(points: Points) -> float:
    """The standard error of `growth`, were the values independent of the time: chance makes four of them of nothing."""
    values = [value for _, value in points[len(points) // 2 :]]
    return statistics.stdev(values) * (12 / len(values)) ** 0.5


@pytest.mark.slow
def test_nothing_wears_out():
    with Inside() as inside, RunningServer(*FLAGS, environ=inside.environ, own_dev_shm=True) as server:
        server.client.close()
        soak = Soak(server)
        soak.run()
        counts = Counter((what, outcome.kind) for what, outcome in soak.outcomes)
        print(dict(counts), f"{len(soak.kills)} kills")
        assert len(soak.kills) >= max(1, int(MINUTES))
        assert counts["question", "right"] > 10 * MINUTES and counts["bad media", "right"]
        for what, outcome in soak.outcomes:
            by_a_kill = any(outcome.begun - CUT_SECONDS <= kill <= outcome.ended for kill in soak.kills)
            assert outcome.kind == "right" or (outcome.kind == "cut" and by_a_kill), (what, outcome)

        for title, taken in soak.samples.items():
            anonymous, shared, files = (points(taken, of) for of in ("anonymous", "shared", "descriptors"))
            mean = statistics.mean(value for _, value in anonymous)
            print(title, f"{growth(anonymous) / mean:+.1%} of {mean / (1 << 20):.0f} MB,",
                  f"{growth(shared) / (1 << 20):+.1f} MB shared, {growth(files):+.1f} descriptors")  # fmt: skip
            assert growth(anonymous) < MAX_GROWTH * mean, title
            assert growth(shared) < MAX_SHARED_GROWTH, title
            assert growth(files) < MAX_MORE_DESCRIPTORS, title
        for name, gauge in soak.gauges.items():
            mean = statistics.mean(value for _, value in gauge)
            print(name, f"{growth(gauge):+g} at {mean:g} (noise {noise(gauge):g})")
            assert growth(gauge) <= 4 * noise(gauge), name
        eventually(lambda: assert_two_api_servers(server), 90)
        titles = [title for title in server.pids() if title != "supervisor"]
        eventually(lambda: assert_nothing_held(server, inside, SURVIVOR, titles), 30)
        server.assert_dev_shm_never_written()


def assert_two_api_servers(server: RunningServer) -> None:
    assert server.log.count("replacement ready") == server.log.count("died: killed by SIGKILL")
