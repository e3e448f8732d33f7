"""Each process is killed, or stopped, at each stage of a request's path, under a load of questions with known answers.

Every client has a right answer, or an error soon after the kill (for a stopped process: after the time-out): those of
the load, and the one whose request is at the stage. No answer is wrong; clients of another API server than the dead one
have only right answers; afterwards the server is complete, and nothing is left over.
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

import pytest

from tests.e2e.asking import ENDLESS, TEXT, Asked, Asking, ask_large, ask_small
from tests.e2e.processes import FailPoint, alive, descendants, descriptors, eventually, stopped
from tests.e2e.running_server import START_SECONDS, RunningServer, message
from tests.faults.load import API_SERVER_DIED, ENGINE_DIED, SOON, Load, Outcome, ask, assert_right_or_ended, outcome_of

ROLES = ("api 0", "core 0", "worker 0.0", "worker 0.1", "supervisor")
APIS = ("api 0", "api 1")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LONG_TEXT = "word " * 600
TIMEOUT_SECONDS = 8  # --collective-timeout, where processes are stopped; where they are killed it is too long to help
DRAIN_SECONDS = 12
SUPERVISOR_STOPPED_SECONDS = 3
MOST_RESTARTS = 3  # of engines on one server: the pause before each is twice that before the last
FLAGS = [
    "--api-server-count", "2", "-tp", "2", "--restart-engine", "1000", "--max-num-batched-tokens", "128",
    "--health-timeout", "2", "--startup-timeout", "120",
]  # fmt: skip
seeds = itertools.count(30_000, 10)  # of videos that no other test asks about: up to ten from each on


class Cluster:
    """A running server that restarts its engine."""

    def __init__(self, server: RunningServer):
        self.server = server
        server.client.close()  # its connection would count
        self.assert_whole()
        self.descriptors = descriptors(server.process.pid)

    def assert_whole(self) -> None:
        """Every API server answers right, and then nothing is held: no requests, descriptors or directories."""
        for api in APIS:
            one = ask_small(next(seeds))
            assert Asking(self.server, api, one).answer() == one.answer
        self.server.assert_at_rest(APIS[0])
        (runtime,) = self.server.tmpdir.iterdir()
        assert len([path for path in runtime.iterdir() if path.name.isdigit()]) == 1  # of the generation that serves

    def assert_recovers(self, *gone: int) -> None:
        """Soon all processes run, none of them one of `gone`, every API server is healthy, and nothing is held."""

        def check() -> None:
            assert self.server.process.poll() is None, self.server.log
            pids = self.server.pids()
            assert pids.keys() == {*ROLES, *APIS} and not {*gone} & {*pids.values()}
            assert all(self.server.get("/health", api).status == 200 for api in APIS)

        eventually(check, START_SECONDS)
        self.assert_whole()
        eventually(lambda: descriptors(self.server.process.pid) == self.descriptors)


@contextlib.contextmanager
def new_cluster(number: int, *flags: str) -> Iterator[Cluster]:
    timeout = ["--collective-timeout", str(TIMEOUT_SECONDS if number == STOP else 120)]
    with RunningServer(*FLAGS, *timeout, *flags) as server:
        yield Cluster(server)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[int], Cluster]]:
    """The server for this signal. It runs until that for the other one is asked for, its supervisor is dead, or the
    next pause before a restart would be long."""
    with contextlib.ExitStack() as stack:
        present: dict[int, Cluster] = {}

        def cluster(number: int) -> Cluster:
            server = present[number].server if number in present else None
            if server is None or server.process.poll() is not None or server.log.count("restart ") >= MOST_RESTARTS:
                present.clear()
                stack.close()
                present[number] = stack.enter_context(new_cluster(number))
            return present[number]

        yield cluster


# --- the stages: while each lasts, a request is where its name says ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AtStage:
    """The request at the named stage."""

    ending: Future[Outcome]  # it ends, at the latest, with the block of the stage
    point: FailPoint | None = None  # that holds it
    holder: int | None = None  # the process that is held with it


Stage = Callable[[Cluster], contextlib.AbstractContextManager[AtStage]]


@contextlib.contextmanager
def awaited(asking: Asking, one: Asked) -> Iterator[Future[Outcome]]:
    """The outcome of the request; the end of the block does not wait for it."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(outcome_of, one, asking.response)
        finally:
            asking.disconnect()
    asking.hang_up()


@contextlib.contextmanager
def held(cluster: Cluster, name: str, one: Asked, system_prompt: str = "") -> Iterator[AtStage]:
    """A new request, and the process that it stopped at a fail point."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    with cluster.server.failpoint(name) as point:
        asking = Asking(cluster.server, "api 0", one, messages=[*system, message(one.text, one.urls)])
        with awaited(asking, one) as ending:
            yield AtStage(ending, point, point.wait())


def decoding(cluster: Cluster) -> contextlib.AbstractContextManager[AtStage]:
    return held(cluster, "decoding", ask_small(next(seeds)))


def transport(cluster: Cluster) -> contextlib.AbstractContextManager[AtStage]:
    """The copy into the store has begun."""
    return held(cluster, "writing", ask_large(next(seeds)))


def prefill(cluster: Cluster) -> contextlib.AbstractContextManager[AtStage]:
    """In the middle of a prompt that the prefix cache does not hold."""
    return held(cluster, "prefilling", ask_small(next(seeds)), f"{next(seeds)} {LONG_TEXT}")


@contextlib.contextmanager
def generation(cluster: Cluster) -> Iterator[AtStage]:
    """It would run for minutes."""
    asking = begun(cluster, "api 0")
    with awaited(asking, TEXT) as ending:
        yield AtStage(ending)


def begun(cluster: Cluster, api: str) -> Asking:
    """An endless request with some output received."""
    asking = Asking(cluster.server, api, TEXT, **ENDLESS)
    asking.read_events(3)
    return asking


STAGES: list[Stage] = [decoding, transport, prefill, generation]
FAST = [("worker 0.1", KILL, generation), ("api 0", KILL, generation), ("core 0", KILL, decoding)]  # on one server


def cells(*axes: list) -> Iterator[object]:
    """Role and signal, then a value of each of `axes`, with the id of all."""
    for number, *rest, role in itertools.product((KILL, STOP), *axes, ROLES):
        marks = [] if (role, number, *rest) in FAST else [pytest.mark.slow]
        names = [*(stage.__name__ for stage in rest), role, signal.Signals(number).name]
        yield pytest.param(role, number, *rest, marks=marks, id="-".join(names))


def bound(role: str, number: int) -> float:
    """Seconds until all that wait have an end. The supervisor asks four times in the time-out: it takes a quarter
    more. It is watched by none itself."""
    return SOON + (1.25 * TIMEOUT_SECONDS if number == STOP and role != "supervisor" else 0)


def endings(role: str) -> tuple[str, ...]:
    """Allowed outcomes of failed requests after the death of this process."""
    return API_SERVER_DIED if role.startswith(("api", "supervisor")) else ENGINE_DIED


@pytest.mark.parametrize(("role", "number", "stage"), list(cells(STAGES)))
def test_fault_at_any_stage_gives_right_answers_or_errors(role, number, stage, clusters):
    cluster = clusters(number)
    server, family = cluster.server, descendants(cluster.server.process.pid)
    victim = server.pids()[role]
    asked = [ask_small(next(seeds)) for _ in range(4)]
    unaffected = going_on = None
    with contextlib.ExitStack() as loads:
        load = loads.enter_context(Load(server, asked))
        load.wait_for("right", len(asked))
        if role == "api 0":
            unaffected = loads.enter_context(Load(server, asked, clients=2, api="api 1"))
            unaffected.wait_for("right", 1)
            going_on = begun(cluster, "api 1")
        with stage(cluster) as there:
            since = time.monotonic()
            os.kill(victim, number)
            # After a death the request ends while it is held. A stopped process is to stay at the stage.
            if there.point is not None and number == STOP and there.holder != victim:
                there.point.release()
            if role == "supervisor":
                assert_of_the_supervisor(server, number, family)
            elif number == STOP:
                time.sleep(bound(role, number) - SOON)  # so that new requests come all along
            ended = []
            if (stage, role, number) == (generation, "supervisor", STOP):
                assert not there.ending.done()
            else:
                ended.append(there.ending.result())
        if going_on is not None:
            going_on.read_events(3)
            going_on.hang_up()
    is_harmless = (role, number) == ("supervisor", STOP)
    assert_right_or_ended([*ended, *load.outcomes], since, bound(role, number), () if is_harmless else endings(role))
    assert unaffected is None or unaffected.tally().keys() == {"right"}, unaffected.tally()
    if (role, number) != ("supervisor", KILL):
        cluster.assert_recovers(*([] if is_harmless else [victim]))


def assert_of_the_supervisor(server: RunningServer, number: int, family: list[int]) -> None:
    """All exit when it dies, and continue when it is stopped."""
    if number == KILL:
        server.process.wait()
        server.assert_nothing_left(family)
        return
    time.sleep(SUPERVISOR_STOPPED_SECONDS)
    assert all(map(alive, family))
    os.kill(server.process.pid, signal.SIGCONT)


def test_other_api_server_serves_during_replacement(clusters):
    cluster = clusters(KILL)
    server, victim = cluster.server, cluster.server.pids()["api 0"]
    with server.failpoint("loading-api") as loading:
        os.kill(victim, KILL)
        loading.wait()
        outcomes = [ask(server, TEXT, max_tokens=1) for _ in range(20)]
    assert {outcome.kind for outcome in outcomes} == {"wrong"}, outcomes  # answered: of one token
    cluster.assert_recovers(victim)


def test_api_server_death_after_its_engine_died_leaves_the_port_to_the_other(clusters):
    """While the engine that is to replace the dead one loads. Without the other, connections are refused at once.

    What the kernel queues at the dead server's listener, until the supervisor has shut that down, is reset.
    """
    cluster = clusters(KILL)
    server, one = cluster.server, ask_small(next(seeds))
    with server.failpoint("loading-worker") as loading:
        old = {api: server.pids()[api] for api in APIS}
        os.kill(server.pids()["core 0"], KILL)
        loading.wait()
        for pid, left, expected in zip(old.values(), (1, 0), ("error", "refused"), strict=True):
            os.kill(pid, KILL)
            eventually(lambda left=left: server.num_listeners() == left)
            for outcome in [ask(server, one) for _ in range(20)]:
                assert outcome.kind == expected and outcome.ended - outcome.begun < SOON, outcome
    cluster.assert_recovers(*old.values())


# --- while it starts, and while it stops ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [KILL, STOP], ids=["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("role", ["api", "core", "worker"])
def test_a_fault_during_a_restart_leads_to_another_restart(role, number, clusters):
    """The engine is dead, and a process of its successor dies, or is stopped, while it loads."""
    cluster = clusters(KILL)
    with cluster.server.failpoint(f"loading-{role}") as point:
        with Load(cluster.server, [ask_small(next(seeds)) for _ in range(4)], clients=2) as load:
            since = time.monotonic()
            os.kill(cluster.server.pids()["core 0"], KILL)
            loading = point.wait(90)
            load.wait_for("error", 3)  # each within its bound, though no engine serves
            os.kill(loading, number)
            if number == KILL:
                point.release()
            load.wait_for("error", 3)
        assert_right_or_ended(load.outcomes, since, SOON)
        eventually(lambda: not alive(loading), 240)  # twice the --startup-timeout
    cluster.assert_recovers(loading)


@pytest.mark.slow
@pytest.mark.parametrize(("role", "number"), list(cells()))
def test_fault_during_a_drain_stops_every_request_and_process(role, number):
    flags = ["--shutdown-timeout", str(DRAIN_SECONDS)]
    with new_cluster(STOP, *flags) as cluster, generation(cluster) as there:
        server, family = cluster.server, descendants(cluster.server.process.pid)
        with Load(server, [ask_small(next(seeds)) for _ in range(4)]) as load:
            load.wait_for("right", 1)
            asked_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: "stopping on SIGTERM" in server.log)
            victim, since = server.pids()[role], time.monotonic()  # both API servers have work, or one has exited
            if (role, number) == ("supervisor", STOP):
                with stopped(victim):
                    time.sleep(SUPERVISOR_STOPPED_SECONDS)
            else:
                os.kill(victim, number)
            status = server.process.wait(DRAIN_SECONDS + 30)
        assert not alive(victim)
        assert status == (-KILL if (role, number) == ("supervisor", KILL) else 0)
        # Clients of a stopped process wait to the end; late requests find the port closed, or being closed.
        patience = since - asked_at + SOON + (DRAIN_SECONDS if number == STOP else 0)
        late = [outcome for outcome in load.outcomes if outcome.begun >= asked_at]
        assert_right_or_ended(late, asked_at, patience, {*ENGINE_DIED, *API_SERVER_DIED})
        in_time = [there.ending.result(), *(outcome for outcome in load.outcomes if outcome.begun < asked_at)]
        assert_right_or_ended(in_time, asked_at, patience, {*ENGINE_DIED, *endings(role)})
        server.assert_nothing_left(family)
