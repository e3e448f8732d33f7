"""A request ends at every stage of its road, by its client or with its API server: all that it held comes back.

Each stage is reached for certain. Either flags hold a request there, or a barrier does (`tests/e2e/barriers.py`); and
before the request is ended, the figures of the processes show where it is and what it holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.asked import Asked, ask_small
from tests.e2e.barriers import Inside, eventually
from tests.e2e.held import assert_nothing_held, holdings, samples, total
from tests.e2e.pinned import Asking, call, wait_for_no_clients
from tests.e2e.running_server import CACHES, RunningServer, message

VICTIM, OTHER, CORE = "mini-engine: api 0", "mini-engine: api 1", "mini-engine: core 0"
FLAGS = [
    "--api-server-count", "2", "--maximum-concurrent-videos", "1", "--max-num-seqs", "1",
    "--max-num-batched-tokens", "128", "--max-num-encoder-input-tokens", "8",
]  # fmt: skip
KEPT = {
    "encoder tokens",
    "media bytes",
    "encoded items",
    "kept items",
}  # what empty caches have none of
LONG_TEXT = "word " * 600
FOR_GOOD = {"max_tokens": 60_000, "ignore_eos": True, "stream": True}


@dataclasses.dataclass(frozen=True)
class Setup:
    cache: str
    transport: str
    ranks: int

    @property
    def flags(self) -> list[str]:
        return [*FLAGS, *CACHES[self.cache], "--mm-tensor-ipc", self.transport, "-tp", str(self.ranks)]

    def __str__(self) -> str:
        return f"{self.cache}-{self.transport}-{self.ranks}"


class Ground:
    """A running server, and what it holds when it is at rest."""

    def __init__(self, setup: Setup, inside: Inside, server: RunningServer):
        self.setup = setup
        self.inside = inside
        self.server = server
        self.workers = [f"mini-engine: worker 0.{rank}" for rank in range(setup.ranks)]
        self.seeds = itertools.count(5000)
        self.asking: list[Asking] = []
        server.client.close()  # its connection would count
        for _ in range(2):
            self.ask_everybody()
        wait_for_no_clients(server)
        self.before = holdings(server, inside)

    def new(self) -> Asked:
        """A question about a video that nobody has seen."""
        return ask_small(next(self.seeds))

    def ask(self, one: Asked, title: str = VICTIM, **more: object) -> Asking:
        self.asking.append(Asking(self.server, title, one, **more))
        return self.asking[-1]

    def close(self) -> None:
        """Close all connections that are still open."""
        while self.asking:
            self.asking.pop().hang_up()

    def held(self, title: str, name: str) -> int:
        return self.inside.figures(self.server.pids()[title])["held"][name]

    def wait_for(self, title: str, **wanted: int) -> None:
        """Until a process counts what is wanted; `_` in the names stands for a blank."""

        def check() -> None:
            counted = {name: self.held(title, name.replace("_", " ")) for name in wanted}
            assert counted == wanted, title

        eventually(check)

    def wait_for_tensors(self, number: int) -> None:
        """Until so many lie on each rank, in messages that are not consumed."""
        self.wait_for(VICTIM, unconsumed_messages=number)
        for worker in self.workers:
            self.wait_for(worker, tensors=number)

    def wait_for_media(self) -> None:
        """Until the core's one request has its item: on all ranks, or in the store, with a reference to it."""
        if self.setup.cache == "shm":
            self.wait_for(VICTIM, being_written=0, unconsumed_messages=0)
            self.wait_for(CORE, media_references=1)
        else:
            self.wait_for_tensors(1)

    @property
    def media_gone(self) -> list[tuple[str, str, int]]:
        """What is counted once that request is over."""
        if self.setup.cache == "shm":
            return [(CORE, "media references", 0), (CORE, "media bytes in use", 0)]
        return [(VICTIM, "unconsumed messages", 0)]

    def wait_for_gauges(self, **wanted: float) -> None:
        def check() -> None:
            figures = samples(self.server, OTHER)
            assert {name: total(figures, name) for name in wanted} == wanted

        eventually(check)

    def ask_everybody(self) -> None:
        """Every API server answers right, from empty caches, and they are empty again: no process keeps any media."""
        for title in (VICTIM, OTHER):
            call(self.server, title, "POST", "/reset_caches")
            one = self.new()
            assert self.ask(one, title).answer() == one.answer
        call(self.server, OTHER, "POST", "/reset_caches")

        def at_rest() -> None:
            assert_nothing_held(self.server, self.inside, OTHER, [VICTIM, OTHER, CORE, *self.workers])
            pids = self.server.pids()
            kept = {title: self.inside.figures(pids[title])["kept"] for title in [VICTIM, OTHER, CORE, *self.workers]}
            full = [f"{title}: {name}" for title, names in kept.items() for name in KEPT & names.keys() if names[name]]
            assert not full

        eventually(at_rest)

    def assert_as_before(self) -> None:
        """Every API server answers right, and no process holds or keeps more than it did, or less."""
        self.ask_everybody()
        eventually(lambda: self.assert_holds(self.before))
        self.server.assert_dev_shm_never_written()
        assert not total(samples(self.server, OTHER), "ipc_fallbacks_total")

    def assert_holds(self, wanted: dict[str, dict[str, int]]) -> None:
        now = holdings(self.server, self.inside)
        differs = {
            f"{title}: {name}": (wanted.get(title, {}).get(name), now.get(title, {}).get(name))
            for title in wanted | now
            for name in wanted.get(title, {}) | now.get(title, {})
            if wanted.get(title, {}).get(name) != now.get(title, {}).get(name)
        }
        assert not differs, differs


@dataclasses.dataclass
class Reached:
    """A request at its stage. `then` is what processes count once it has ended, while the stage is still held."""

    asking: Asking
    then: list[tuple[str, str, int]]


# --- the stages: each holds a request where its name says, and proves it ----------------------------------------------


@contextlib.contextmanager
def queued(ground: Ground) -> Iterator[Reached]:
    """In line for admission, behind one that is decoded."""
    one = ground.new()
    with ground.inside.barrier("decoding") as barrier:
        first = ground.ask(one)
        barrier.wait_until_held()
        second = ground.ask(ground.new())
        ground.wait_for(VICTIM, admitted=1, in_line=1)
        victim = ground.server.pids()[VICTIM]
        yield Reached(second, [(VICTIM, "in line", 0), (VICTIM, "admitted", 1)])
    if ground.server.pids().get(VICTIM) == victim:
        assert first.answer() == one.answer
    else:
        assert first.is_cut()


@contextlib.contextmanager
def in_media_thread(ground: Ground, name: str) -> Iterator[Reached]:
    decodes = total(samples(ground.server, OTHER), "media_decodes_total")
    with ground.inside.barrier(name) as barrier:
        asking = ground.ask(ground.new())
        assert barrier.wait_until_held()["pid"] == ground.server.pids()[VICTIM]
        ground.wait_for(VICTIM, admitted=1, at_work=1)
        yield Reached(asking, [(VICTIM, "admitted", 0), (VICTIM, "at work", 0), (VICTIM, "preparing", 0)])
        assert total(samples(ground.server, OTHER), "media_decodes_total") == decodes


def decoding(ground: Ground) -> contextlib.AbstractContextManager[Reached]:
    """In the middle of its frames."""
    return in_media_thread(ground, "decoding")


def processing(ground: Ground) -> contextlib.AbstractContextManager[Reached]:
    """Its frames are there, its patches are not."""
    return in_media_thread(ground, "processing")


@contextlib.contextmanager
def storing(ground: Ground) -> Iterator[Reached]:
    """In the middle of the copy into the store."""
    with ground.inside.barrier("storing") as barrier:
        asking = ground.ask(ground.new())
        assert barrier.wait_until_held()["pid"] == ground.server.pids()[VICTIM]
        ground.wait_for(VICTIM, samples=1, being_written=1)
        ground.wait_for(CORE, requests=0, reservations=1)
        yield Reached(asking, [(VICTIM, "samples", 0), (VICTIM, "admitted", 0), (VICTIM, "being written", 1)])


@contextlib.contextmanager
def sent(ground: Ground) -> Iterator[Reached]:
    """Accepted, its tensors sent; one rank has not read them."""
    name = f'ipc_messages_total{{transport="{ground.setup.transport}"}}'
    before = samples(ground.server, OTHER)[name]
    with ground.inside.barrier("receiving") as barrier:
        asking = ground.ask(ground.new())
        pid = barrier.wait_until_held()["pid"]
        (deaf,) = [title for title in ground.workers if ground.server.pids()[title] == pid]
        for worker in ground.workers:
            ground.wait_for(worker, tensors=int(worker != deaf))
        ground.wait_for(CORE, requests=1, awaiting_media=2)  # the request, and its one message
        ground.wait_for(VICTIM, samples=1, unconsumed_messages=1)
        ground.wait_for_gauges(num_requests_waiting=1)
        figures = samples(ground.server, OTHER)
        assert figures[name] == before + ground.setup.ranks
        assert total(figures, "ipc_buffered_bytes") > 0
        # Its message is released once every rank has reported it: the one that is held has not.
        gone = [(CORE, "requests", 0), (CORE, "awaiting media", 0), (VICTIM, "unconsumed messages", 1)]
        yield Reached(asking, gone)


@contextlib.contextmanager
def received(ground: Ground) -> Iterator[Reached]:
    """Its tensors are on all ranks; the core has not taken the request."""
    with ground.inside.barrier("accepting") as barrier:
        asking = ground.ask(ground.new())
        assert barrier.wait_until_held()["pid"] == ground.server.pids()[CORE]
        ground.wait_for(CORE, requests=0)
        ground.wait_for(VICTIM, samples=1)
        if ground.setup.cache == "shm":
            ground.wait_for(VICTIM, being_written=0, unconsumed_messages=0)
        else:
            ground.wait_for_tensors(1)
        yield Reached(asking, [(VICTIM, "samples", 1)])  # its end is the core's to tell


@contextlib.contextmanager
def behind_another(ground: Ground, one: Asked) -> Iterator[Asking]:
    """A request in the core's line, behind one without media that goes on for good."""
    text = Asked("tell me", "", [])
    first = ground.ask(text, OTHER, **FOR_GOOD)
    try:
        first.read_events(2)
        asking = ground.ask(one)
        ground.wait_for(CORE, requests=2, awaiting_media=0)
        ground.wait_for_gauges(num_requests_running=1, num_requests_waiting=1)
        assert asking.has_nothing_yet()
        yield asking
        first.read_events(2)
    finally:
        first.hang_up()


@contextlib.contextmanager
def waiting(ground: Ground) -> Iterator[Reached]:
    """In the core's line, its tensors on all ranks."""
    with behind_another(ground, ground.new()) as asking:
        ground.wait_for_media()
        yield Reached(asking, [(CORE, "requests", 1), *ground.media_gone])


@contextlib.contextmanager
def waiting_on_kept_media(ground: Ground) -> Iterator[Reached]:
    """In the core's line, its media named by their hash: they are referenced, and no tensor was sent."""
    one = ground.new()
    assert ground.ask(one, OTHER).answer() == one.answer
    eventually(lambda: assert_nothing_held(ground.server, ground.inside, OTHER, [CORE]))
    decodes = total(samples(ground.server, OTHER), "media_decodes_total")
    with behind_another(ground, one) as asking:
        ground.wait_for(CORE, media_references=1)
        ground.wait_for_gauges(mm_cache_references=1)
        ground.wait_for(VICTIM, unconsumed_messages=0)
        assert total(samples(ground.server, OTHER), "media_decodes_total") == decodes
        yield Reached(asking, [(CORE, "requests", 1), (CORE, "media references", 0), (CORE, "media bytes in use", 0)])


@contextlib.contextmanager
def prefilling(ground: Ground) -> Iterator[Reached]:
    """In the middle of a prompt whose media come at its end."""
    one = ground.new()
    messages = [{"role": "system", "content": LONG_TEXT}, message(one.text, one.urls)]
    with ground.inside.barrier("prefilling") as barrier:
        asking = ground.ask(one, messages=messages, stream=True)
        told = barrier.wait_until_held()
        ((start, num_tokens),) = told["chunks"]
        assert start > 0 and num_tokens <= 128 and not told["encode"]
        ground.wait_for(CORE, requests=1, awaiting_media=0)
        assert ground.held(CORE, "KV blocks") >= start // 16
        assert ground.held(CORE, "encoder tokens in use") == 16
        ground.wait_for_media()
        assert asking.has_nothing_yet()
        gone = [(CORE, "requests", 0), (CORE, "KV blocks", 0), (CORE, "encoder tokens in use", 0)]
        yield Reached(asking, gone)


@contextlib.contextmanager
def encoding(ground: Ground) -> Iterator[Reached]:
    """In the vision tower, half of its video encoded."""
    with ground.inside.barrier("encoding") as barrier:
        asking = ground.ask(ground.new())
        told = barrier.wait_until_held()
        assert told["encode"] == [[2, 2]]  # of four grids
        for worker in ground.workers:
            ground.wait_for(worker, sequences=1)
        ground.wait_for(CORE, requests=1, encoder_tokens_in_use=16)
        assert asking.has_nothing_yet()
        yield Reached(asking, [(CORE, "requests", 0), (CORE, "KV blocks", 0)])


@contextlib.contextmanager
def generating(ground: Ground) -> Iterator[Reached]:
    """Some of its tokens are with the client."""
    asking = ground.ask(ground.new(), **FOR_GOOD)
    asking.read_events(3)
    ground.wait_for_gauges(num_requests_running=1)
    ground.wait_for(CORE, requests=1)
    assert ground.held(CORE, "KV blocks") > 0
    yield Reached(asking, [(CORE, "requests", 0), (CORE, "KV blocks", 0), (CORE, "encoder tokens in use", 0)])


STAGES: list[Callable[[Ground], contextlib.AbstractContextManager[Reached]]] = [
    queued, decoding, processing, storing, sent, received,
    waiting, waiting_on_kept_media, prefilling, encoding, generating,
]  # fmt: skip
SETUPS = [Setup(*setup) for setup in itertools.product(CACHES, ("torch_shm", "direct_rpc"), (1, 2))]
# By default every stage with the store, and with the queue those in which it holds something.
FAST = {Setup("shm", "torch_shm", 1): set(STAGES), Setup("lru", "torch_shm", 1): {sent}}
# What there is not: nothing is kept, nothing is stored, or no rank is sent anything.
ABSENT = {"off": {waiting_on_kept_media, storing}, "lru": {storing}, "shm": {sent}}


def cases() -> Iterator[object]:
    for setup in SETUPS:
        for stage, how in itertools.product(STAGES, ("client leaves", "API server is killed")):
            if stage not in ABSENT[setup.cache]:
                marks = [] if stage in FAST.get(setup, ()) else [pytest.mark.slow]
                yield pytest.param(setup, stage, how, marks=marks, id=f"{setup}-{stage.__name__}-{how}")


@pytest.fixture(scope="module")
def grounds() -> Iterator[Callable[[Setup], Ground]]:
    """The ground of a setup, which runs until another one is asked for."""
    with contextlib.ExitStack() as stack:
        present: list[Ground] = []

        def ground(setup: Setup) -> Ground:
            if not (present and present[0].setup == setup):
                present.clear()
                stack.close()
                inside = stack.enter_context(Inside())
                server = stack.enter_context(RunningServer(*setup.flags, environ=inside.environ, own_dev_shm=True))
                present.append(Ground(setup, inside, server))
            return present[0]

        yield ground


@pytest.mark.parametrize(("setup", "stage", "how"), list(cases()))
def test_all_comes_back(setup, stage, how, grounds):
    ground = grounds(setup)
    victim = ground.server.pids()[VICTIM]
    survivors = [OTHER, CORE, *ground.workers]
    with contextlib.closing(ground), stage(ground) as reached:
        if how == "client leaves":
            survivors.append(VICTIM)
            reached.asking.hang_up()
        else:
            os.kill(victim, signal.SIGKILL)
            assert reached.asking.is_cut()
        for title, name, number in reached.then:
            if title in survivors:
                ground.wait_for(title, **{name.replace(" ", "_"): number})
    eventually(lambda: assert_nothing_held(ground.server, ground.inside, OTHER, survivors))
    ground.assert_as_before()
    assert (ground.server.pids()[VICTIM] == victim) == (how == "client leaves")
