"""Each process is killed, or stopped, at each stage of a request's path, under a load of questions with known answers.

`test_death_and_hang.py` stops the supervisor, which has no part in that path.

Every client has a right answer, or an error soon after the kill (for a stopped process: after the time-out): those of
the load, and the one whose request is at the stage. No answer is wrong; clients of another API server than the dead one
have only right answers; afterwards the server is complete, and nothing is left over.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.faults.load import API_SERVER_DIED, ENGINE_DIED, SOON, Load, ask, assert_right_or_ended, awaited
from tests.support.client import ENDLESS, TEXT, ClientRequest
from tests.support.processes import alive, descendants, descriptors, eventually
from tests.support.running_server import START_SECONDS, RunningServer
from tests.support.stages import API, OTHER, STAGES, generating, new_question

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
TIMEOUT_SECONDS = 8  # --collective-timeout, where processes are stopped; where they are killed it is too long to help
HUNG = SOON + 1.25 * TIMEOUT_SECONDS  # the supervisor asks four times in the time-out: it takes a quarter more
DRAIN_SECONDS = 12
MOST_RESTARTS = 3  # of engines on one server: the pause before each is twice that before the last
FLAGS = [
    "--api-server-count", "2", "-tp", "2", "--restart-engine", "1000", "--max-num-batched-tokens", "128",
    "--health-timeout", "2", "--startup-timeout", "120",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fault:
    """A signal to a process; how requests without an answer end after it, and how many seconds after; and whether
    clients of the other API server have right answers all along."""

    role: str
    number: signal.Signals
    endings: tuple[str, ...]
    seconds: float = SOON
    is_other_spared: bool = False

    def __str__(self) -> str:
        return f"{self.role}-{self.number.name}"


DEATHS = [
    Fault("api 0", KILL, API_SERVER_DIED, is_other_spared=True),
    Fault("core 0", KILL, ENGINE_DIED),
    Fault("worker 0.0", KILL, ENGINE_DIED),
    Fault("worker 0.1", KILL, ENGINE_DIED),
]
HANGS = [dataclasses.replace(death, number=STOP, seconds=HUNG) for death in DEATHS]
AT_STAGES = ("decoding", "storing", "prefilling", "generating")
FAST = [("generating", "api 0-SIGKILL"), ("decoding", "core 0-SIGKILL")]
CELLS = [
    pytest.param(fault, name, id=f"{name}-{fault}", marks=[] if (name, str(fault)) in FAST else [pytest.mark.slow])
    for faults in (DEATHS, HANGS)  # one server after the other
    for name in AT_STAGES
    for fault in faults
]


class RestartingServer(RunningServer):
    """It restarts its engine. Where processes are to be stopped, those that do not answer are killed soon."""

    def __init__(self, number: int, *flags: str):
        timeout = ["--collective-timeout", str(TIMEOUT_SECONDS if number == STOP else 120)]
        super().__init__(*FLAGS, *timeout, *flags)

    def wait_until_serving(self) -> None:
        super().wait_until_serving()
        self.client.close()  # its connection would count
        self.assert_whole()
        self.descriptors = descriptors(self.process.pid)

    def assert_whole(self) -> None:
        """Every API server answers right, and then nothing is held: no requests, descriptors or directories."""
        for api in (API, OTHER):
            assert ask(self, new_question(), api=api).kind == "right"
        self.assert_at_rest(API)
        (runtime,) = self.tmpdir.iterdir()
        assert len([path for path in runtime.iterdir() if path.name.isdigit()]) == 1  # of the generation that serves

    def assert_recovers(self, *gone: int) -> None:
        """Soon all processes run, none of them one of `gone`, every API server is healthy, and nothing is held."""

        def check() -> None:
            assert self.process.poll() is None, self.log
            pids = self.pids()
            assert pids.keys() == {"supervisor", API, OTHER, "core 0", "worker 0.0", "worker 0.1"}
            assert not {*gone} & {*pids.values()}
            assert all(self.get("/health", api).status == 200 for api in (API, OTHER))

        eventually(check, START_SECONDS)
        self.assert_whole()
        eventually(lambda: descriptors(self.process.pid) == self.descriptors)


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[int], RestartingServer]]:
    """The server for this signal. It runs until that for the other one is asked for, its supervisor is dead, or the
    next pause before a restart would be long."""
    with contextlib.ExitStack() as stack:
        running: dict[int, RestartingServer] = {}

        def server(number: int) -> RestartingServer:
            old = running.get(number)
            if old is None or old.process.poll() is not None or old.log.count("restart ") >= MOST_RESTARTS:
                running.clear()
                stack.close()
                running[number] = stack.enter_context(RestartingServer(number))
            return running[number]

        yield server


@pytest.fixture
def server(fault: Fault, servers: Callable[[int], RestartingServer]) -> RestartingServer:
    return servers(fault.number)


@contextlib.contextmanager
def load_of_four(server: RunningServer) -> Iterator[Load]:
    with Load(server, [new_question() for _ in range(4)]) as load:
        load.wait_for("right", 4)
        yield load


@contextlib.contextmanager
def right_answers_only(server: RunningServer, api: str) -> Iterator[None]:
    """Clients of this API server have nothing else, and a stream of it goes on, while the block runs."""
    stream = ClientRequest(server, api, TEXT, **ENDLESS)
    stream.read_events(3)
    with Load(server, [new_question()], clients=2, api=api) as load:
        load.wait_for("right", 1)
        yield
        stream.read_events(3)
    stream.hang_up()
    assert load.tally().keys() == {"right"}, load.tally()


@pytest.mark.parametrize(("fault", "stage"), CELLS)
def test_fault_at_any_stage_gives_right_answers_or_errors(fault, stage, server):
    """After a death the request ends while it is held. A process that is stopped is to stay at the stage."""
    victim = server.pids()[fault.role]
    others = right_answers_only(server, OTHER) if fault.is_other_spared else contextlib.nullcontext()
    with load_of_four(server) as load, others:
        with STAGES[stage](server) as held, awaited(held) as ending:
            since = time.monotonic()
            os.kill(victim, fault.number)
            if held.point is not None and fault.number == STOP and held.holder != victim:
                held.point.release()
            time.sleep(fault.seconds - SOON)  # so that new requests come all along
            ended = ending.result()
    in_flight = [ended, *(outcome for outcome in load.outcomes if outcome.begun < since)]
    assert_right_or_ended(in_flight, since, fault.seconds, fault.endings)
    assert_right_or_ended(load.outcomes, since, fault.seconds, {*fault.endings, *API_SERVER_DIED})
    server.assert_recovers(victim)


# --- while it starts, and while it stops ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [KILL, STOP], ids=["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("role", ["api", "core", "worker"])
def test_a_fault_during_a_restart_leads_to_another_restart(role, number, servers):
    """The engine is dead, and a process of its successor dies, or is stopped, while it loads."""
    server = servers(KILL)
    with server.failpoint(f"loading-{role}") as point:
        with Load(server, [new_question() for _ in range(4)], clients=2) as load:
            since = time.monotonic()
            os.kill(server.pids()["core 0"], KILL)
            loading = point.wait(90)
            load.wait_for("right" if role == "api" else "refused", 3)  # an API server does not wait for the others
            os.kill(loading, number)
            if number == KILL:
                point.release()
                load.wait_for("refused", 3)
        assert_right_or_ended(load.outcomes, since, SOON, {*ENGINE_DIED, *API_SERVER_DIED})
        eventually(lambda: not alive(loading), 240)  # twice the --startup-timeout
    server.assert_recovers(loading)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [DEATHS[0], HANGS[2]], ids=str)
def test_fault_during_a_drain_stops_every_request_and_process(fault):
    server = RestartingServer(STOP, "--shutdown-timeout", str(DRAIN_SECONDS))
    with server, generating(server) as held, awaited(held) as ending:
        family = descendants(server.process.pid)
        with Load(server, [new_question() for _ in range(4)]) as load:
            load.wait_for("right", 1)
            asked_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: "stopping on SIGTERM" in server.log)
            victim, since = server.pids()[fault.role], time.monotonic()  # both have work, or one API server has exited
            os.kill(victim, fault.number)
            status = server.process.wait(DRAIN_SECONDS + 30)
        assert not alive(victim)
        assert status == 0
        # Clients of a stopped process wait to the end; late requests find the port closed, or being closed.
        patience = since - asked_at + SOON + (DRAIN_SECONDS if fault.number == STOP else 0)
        late = [outcome for outcome in load.outcomes if outcome.begun >= asked_at]
        assert_right_or_ended(late, asked_at, patience, {*ENGINE_DIED, *API_SERVER_DIED})
        in_time = [ending.result(), *(outcome for outcome in load.outcomes if outcome.begun < asked_at)]
        assert_right_or_ended(in_time, asked_at, patience, {*ENGINE_DIED, *fault.endings})
        server.assert_nothing_left(family)
