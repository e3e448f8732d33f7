"""Each role is killed, or stands still, at each stage of a request's road, under a load of checkable questions.

Every client has a right answer, or is told soon after the kill (after the time-out, for one that stands still): those
of the load, and the one whose request is at the stage. Nobody has a wrong answer; who is connected to another API
server than the dead one has none but right ones; afterwards the server is whole, and nothing is left over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from tests.e2e.asked import Asked
from tests.e2e.barriers import Barrier, eventually
from tests.e2e.pinned import Asking
from tests.e2e.running_server import RunningServer, alive, descendants, message
from tests.faults.ground import (
    API_SERVERS,
    NO_SILENCE,
    SILENCE_SECONDS,
    STARTUP_SECONDS,
    TOLD_WITHIN_SECONDS,
    Ground,
    a_ground,
    questions,
)
from tests.faults.load import LEFT, TOLD, Load, Outcome, ask, assert_only_right_or_told, outcome_of

ROLES = ("api 0", "core 0", "worker 0.0", "worker 0.1", "supervisor")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
LONG_TEXT = "word " * 600
ENDLESS = {"max_tokens": 60_000, "ignore_eos": True, "stream": True}
STANDSTILL_SECONDS = 3  # of a supervisor, which nobody watches
seeds = itertools.count(30_000, 10)  # of videos that nobody has asked about: up to ten from each on


# --- the stages: while each lasts, a request is where its name says ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AtStage:
    """The request that is where the stage's name says."""

    ending: Future[Outcome]  # which it has, at the latest, when the block of the stage is left
    barrier: Barrier | None = None  # that holds it
    holder: int | None = None  # the process that is held with it

    def let_go(self, victim: int) -> None:
        """Unless its process stands still itself: it is to do so there."""
        if self.barrier is not None and self.holder != victim:
            self.barrier.let_go()


Stage = Callable[[Ground], contextlib.AbstractContextManager[AtStage | None]]


@contextlib.contextmanager
def awaited(asking: Asking, one: Asked) -> Iterator[Future[Outcome]]:
    """How the request ends, noted when it does; after the block nobody waits for that any more."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(outcome_of, one, asking.response)
        finally:
            asking.disconnect()
    asking.hang_up()


@contextlib.contextmanager
def held(ground: Ground, barrier_name: str, system_prompt: str = "") -> Iterator[AtStage]:
    """A request that nobody has asked yet, and the process that has come with it to a barrier."""
    (one,) = questions(next(seeds), 1)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    with ground.inside.barrier(barrier_name) as barrier:
        asking = Asking(ground.server, "mini-engine: api 0", one, messages=[*system, message(one.text, one.urls)])
        with awaited(asking, one) as ending:
            yield AtStage(ending, barrier, barrier.wait_until_held()["pid"])


@contextlib.contextmanager
def idle(ground: Ground) -> Iterator[None]:
    """Nobody asks."""
    yield


def decoding(ground: Ground) -> contextlib.AbstractContextManager[AtStage]:
    return held(ground, "decoding")


def transport(ground: Ground) -> contextlib.AbstractContextManager[AtStage]:
    """The copy into the store has begun."""
    return held(ground, "storing")


def prefill(ground: Ground) -> contextlib.AbstractContextManager[AtStage]:
    return held(ground, "prefilling", f"{next(seeds)} {LONG_TEXT}")  # the prefix cache holds none like it


@contextlib.contextmanager
def generation(ground: Ground) -> Iterator[AtStage]:
    """It would go on for minutes."""
    one = Asked("tell me", "", [])
    asking = begun(ground, "mini-engine: api 0", one)
    with awaited(asking, one) as ending:
        yield AtStage(ending)


def begun(ground: Ground, title: str, one: Asked) -> Asking:
    """An endless request of which some has come."""
    asking = Asking(ground.server, title, one, **ENDLESS)
    asking.read_events(3)
    return asking


@contextlib.contextmanager
def endless(ground: Ground, title: str) -> Iterator[Asking]:
    """One that goes on while the block runs."""
    asking = begun(ground, title, Asked("tell me", "", []))
    yield asking
    asking.hang_up()


STAGES: list[Stage] = [idle, decoding, transport, prefill, generation]
FAST = {  # on one server
    ("worker 0.1", signal.SIGKILL, generation, 2),
    ("api 0", signal.SIGKILL, generation, 2),
    ("core 0", signal.SIGKILL, decoding, 2),
}


def cells(stages: list) -> Iterator[object]:
    for ranks, number, stage, role in itertools.product((2, 1), SIGNALS, stages, ROLES):
        if ranks == 1 and role == "worker 0.1":
            continue
        marks = [] if (role, number, stage, ranks) in FAST else [pytest.mark.slow]
        name = f"{ranks}-{stage.__name__}-{role}-{number.name}"
        yield pytest.param(ranks, stage, role, number, marks=marks, id=name)


@pytest.fixture(scope="module")
def grounds() -> Iterator[Callable[..., Ground]]:
    """The ground with so many ranks, for this signal: it lives until another one is asked for, or its supervisor is
    dead."""
    with contextlib.ExitStack() as stack:
        present: dict[tuple[int, int], Ground] = {}

        def ground(ranks: int, number: int = signal.SIGKILL) -> Ground:
            key = (ranks, number)
            if key not in present or present[key].server.process.poll() is not None:
                present.clear()
                stack.close()
                flags = NO_SILENCE if number == signal.SIGKILL else ()
                present[key] = stack.enter_context(a_ground(ranks, *flags))
            return present[key]

        yield ground


def bound(role: str, number: int) -> float:
    """Seconds until all who wait are told. The supervisor asks four times in the time-out; hence a fifth quarter."""
    hangs = number == signal.SIGSTOP and role != "supervisor"  # whom nobody watches
    return TOLD_WITHIN_SECONDS + (1.25 * SILENCE_SECONDS if hangs else 0)


def ways(role: str) -> tuple[str, ...]:
    """How requests may end that have no answer, when this one has died."""
    return LEFT if role.startswith(("api", "supervisor")) else TOLD


@pytest.mark.parametrize(("ranks", "stage", "role", "number"), list(cells(STAGES)))
def test_everybody_is_answered_or_told(ranks, stage, role, number, grounds):
    ground = grounds(ranks, number)
    family = descendants(ground.server.process.pid)
    victim = ground.pid(role)
    asked = questions(next(seeds), 4)
    untouched = None
    with contextlib.ExitStack() as loads:
        load = loads.enter_context(Load(ground.server, asked)) if stage is not idle else None
        if load is not None:
            load.wait_for("right", len(asked))
            if role == "api 0":
                untouched = loads.enter_context(Load(ground.server, asked, clients=2, title="mini-engine: api 1"))
                untouched.wait_for("right", 1)
                going_on = loads.enter_context(endless(ground, "mini-engine: api 1"))
        with stage(ground) as there:
            since = ground.hurt(role, number)
            if there is not None and number == signal.SIGSTOP:  # of a death it is to be told while it is held
                there.let_go(victim)
            if role == "supervisor":
                assert_of_the_supervisor(ground, number, family)
            elif load is not None and number == signal.SIGSTOP:
                time.sleep(bound(role, number) - TOLD_WITHIN_SECONDS)  # so that new ones come all along
            told = ends(there, stage, role, number)
        if untouched is not None:
            going_on.read_events(3)
    told += load.outcomes if load else []
    unharmed = (role, number) == ("supervisor", signal.SIGSTOP)
    assert_only_right_or_told(told, since, bound(role, number), () if unharmed else ways(role))
    if untouched is not None:
        assert untouched.tally().keys() == {"right"}, untouched.tally()
    if (role, number) == ("supervisor", signal.SIGKILL):
        return
    if role != "supervisor":
        recover(ground, {victim}, asked)
    ground.assert_whole()
    ground.assert_nothing_left_over()


def ends(there: AtStage | None, stage: Stage, role: str, number: int) -> list[Outcome]:
    """How the request at the stage has ended, if there is one; an endless one goes on if nobody has died."""
    if there is None:
        return []
    if (stage, role, number) == (generation, "supervisor", signal.SIGSTOP):
        assert not there.ending.done()
        return []
    return [there.ending.result()]


def recover(ground: Ground, gone: set[int], asked: list[Asked]) -> None:
    """The server becomes whole again and answers."""
    ground.wait_until_whole(gone)
    with Load(ground.server, asked) as load:
        load.wait_for("right", 2 * len(asked))
    assert load.tally().keys() == {"right"}, load.tally()


def assert_of_the_supervisor(ground: Ground, number: int, family: list[int]) -> None:
    """With a dead one all end; without one that works all go on."""
    if number == signal.SIGKILL:
        ground.server.process.wait()
        ground.server.assert_nothing_left(family)
        return
    time.sleep(STANDSTILL_SECONDS)
    assert all(map(alive, family))
    ground.hurt("supervisor", signal.SIGCONT)


def test_an_api_server_of_a_dead_engine_that_dies_itself_leaves_its_line_to_the_other(grounds):
    """While the engine that is to replace the dead one loads. Without the other, connections are refused at once."""
    ground = grounds(2)
    (one,) = questions(next(seeds), 1)
    with ground.inside.barrier("loading-worker") as barrier:
        old = {f"api {slot}": ground.pid(f"api {slot}") for slot in range(API_SERVERS)}
        ground.hurt("core 0", signal.SIGKILL)
        barrier.wait_until_held()
        for (name, pid), expected in zip(old.items(), ("error", "refused"), strict=True):
            os.kill(pid, signal.SIGKILL)
            eventually(partial(assert_in, f"{name} (pid {pid}) died: killed by SIGKILL", ground.server))
            for outcome in [ask(ground.server, one) for _ in range(20)]:
                assert outcome.kind == expected and outcome.ended - outcome.begun < TOLD_WITHIN_SECONDS, outcome
    ground.wait_until_whole(set(old.values()))
    ground.assert_whole()
    ground.assert_nothing_left_over()


def assert_in(text: str, server: RunningServer) -> None:
    assert text in server.log, server.log


# --- while it starts, and while it stops ------------------------------------------------------------------------------


def starting_cells() -> Iterator[object]:
    for ranks, role, number in itertools.product((2, 1), ("api", "core", "worker"), SIGNALS):
        yield pytest.param(ranks, role, number, id=f"{ranks}-{role}-{number.name}")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "role", "number"), list(starting_cells()))
def test_a_start_after_a_death_that_is_hurt_itself(ranks, role, number, grounds):
    """The engine is dead, and one of those that are to replace it dies, or stands still, while it loads."""
    ground = grounds(ranks)
    asked = questions(next(seeds), 4)
    with ground.inside.barrier(f"loading-{role}") as barrier:
        with Load(ground.server, asked, clients=2) as load:
            since = ground.hurt("core 0", signal.SIGKILL)
            loading = barrier.wait_until_held(90)["pid"]
            load.wait_for("error", 3)  # each within its bound, though nobody serves
            os.kill(loading, number)
            if number == signal.SIGKILL:
                barrier.let_go()
            load.wait_for("error", 3)
        assert_only_right_or_told(load.outcomes, since, TOLD_WITHIN_SECONDS)
        deadline = time.monotonic() + 2 * STARTUP_SECONDS
        while alive(loading):
            assert time.monotonic() < deadline, ground.server.log
            time.sleep(0.1)
    ground.wait_until_whole({loading})
    ground.assert_whole()
    ground.assert_nothing_left_over()


DRAIN_SECONDS = 12


def draining_cells() -> Iterator[object]:
    for ranks, role, number in itertools.product((2, 1), ROLES, SIGNALS):
        if not (ranks == 1 and role == "worker 0.1"):
            yield pytest.param(ranks, role, number, id=f"{ranks}-{role}-{number.name}")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "role", "number"), list(draining_cells()))
def test_a_drain_that_is_hurt(ranks, role, number):
    with a_ground(ranks, "--shutdown-timeout", str(DRAIN_SECONDS)) as ground, generation(ground) as there:
        server, family = ground.server, descendants(ground.server.process.pid)
        with Load(server, questions(next(seeds), 4)) as load:
            load.wait_for("right", 1)
            asked_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            while "stopping on SIGTERM" not in server.log:
                time.sleep(0.02)
            victim = ground.pid(role)  # both API servers have something to do, or one has ended
            since = ground.hurt(role, number)
            if (role, number) == ("supervisor", signal.SIGSTOP):
                time.sleep(STANDSTILL_SECONDS)
                ground.hurt(role, signal.SIGCONT)
            status = server.process.wait(DRAIN_SECONDS + 30)
        assert not alive(victim)
        assert status == (-signal.SIGKILL if (role, number) == ("supervisor", signal.SIGKILL) else 0)
        # Who waits for one that stands still is told at the end; who comes late finds the port closed, or being closed.
        patience = since - asked_at + TOLD_WITHIN_SECONDS + (DRAIN_SECONDS if number == signal.SIGSTOP else 0)
        late = [outcome for outcome in load.outcomes if outcome.begun >= asked_at]
        assert_only_right_or_told(late, asked_at, patience, {*TOLD, *LEFT})
        in_time = [there.ending.result(), *(outcome for outcome in load.outcomes if outcome.begun < asked_at)]
        assert_only_right_or_told(in_time, asked_at, patience, {*TOLD, *ways(role)})
        server.assert_nothing_left(family)
