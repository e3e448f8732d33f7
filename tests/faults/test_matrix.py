"""Each process is killed, or stopped, at each stage of a request's path, under a load of questions with known answers.

`test_death_and_hang.py` stops the supervisor, which has no part in that path.

Every client has a right answer, or an error soon after the kill (for a stopped process: after the time-out): those of
the load, and the one whose request is at the stage. No answer is wrong; clients of another API server than the dead one
have only right answers; afterwards the server is complete, and nothing is left over.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.load import API_SERVER_DIED, ENGINE_DIED, SOON, Load, ask, assert_right_or_ended, outcome_of
from tests.support.client import ENDLESS, TEXT, ClientRequest
from tests.support.processes import alive, descendants, descriptors, eventually
from tests.support.running_server import START_SECONDS, RunningServer
from tests.support.stages import API, OTHER, at_stage, new_question

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
TIMEOUT_SECONDS = 8  # --collective-timeout, where processes are stopped; where they are killed it is too long to help


class RestartingServer(RunningServer):
    """It restarts its engine. Where processes are to be stopped, those that do not answer are killed soon."""

    def __init__(self, number: int, *flags: str):
        sizes = "--api-server-count 2 -tp 2 --restart-engine 1000 --max-num-batched-tokens 128"
        seconds = TIMEOUT_SECONDS if number == STOP else 120
        timeouts = f"--health-timeout 2 --startup-timeout 120 --collective-timeout {seconds}"
        super().__init__(*f"{sizes} {timeouts}".split(), *flags)

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


@contextlib.contextmanager
def right_answers_only(server: RunningServer) -> Iterator[None]:
    """Clients of the other API server have nothing else, and a stream of it goes on, while the block runs."""
    stream = ClientRequest(server, OTHER, TEXT, **ENDLESS)
    stream.read_events(3)
    with Load(server, [new_question()], clients=2, api=OTHER) as load:
        load.wait_for("right", 1)
        yield
        stream.read_events(3)
    stream.hang_up()
    assert load.tally().keys() == {"right"}, load.tally()


@pytest.mark.parametrize(
    ("stage", "role", "number"),
    [
        pytest.param(
            *cell, marks=() if cell in (("generating", API, KILL), ("decoding", "core 0", KILL)) else pytest.mark.slow
        )
        for cell in itertools.product(
            ("decoding", "writing", "prefilling", "generating"),
            (API, "core 0", "worker 0.0", "worker 0.1"),
            (KILL, STOP),
        )
    ],
)
def test_fault_at_any_stage_gives_right_answers_or_errors(stage, role, number):
    """After a death the request ends while it is held. A process that is stopped is to stay at the stage."""
    endings = API_SERVER_DIED if role == API else ENGINE_DIED
    # The supervisor asks a process that hangs four times in the time-out: it takes a quarter more.
    bound = SOON + (1.25 * TIMEOUT_SECONDS if number == STOP else 0)
    with RestartingServer(number) as server:
        victim = server.pids()[role]
        with Load(server, [new_question() for _ in range(4)]) as load:
            load.wait_for("right", 4)
            others = right_answers_only(server) if role == API else contextlib.nullcontext()
            with others, at_stage(server, stage) as held, ThreadPoolExecutor(1) as pool:
                ending = pool.submit(outcome_of, lambda: held)
                since = time.monotonic()
                os.kill(victim, number)
                if number == STOP and not [*server.failpoints.glob(f"*.held.{victim}")]:
                    server.failpoint(stage).release()  # the process that is held at the stage goes on
                time.sleep(bound - SOON)  # so that new requests come all along
                ended = ending.result()
        in_flight = [ended, *(outcome for outcome in load.outcomes if outcome.begun < since)]
        assert_right_or_ended(in_flight, since, bound, endings)
        assert_right_or_ended(load.outcomes, since, bound, {*endings, *API_SERVER_DIED})
        server.assert_recovers(victim)


# --- while it starts, and while it stops ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [KILL, STOP], ids=["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("role", ["api", "core", "worker"])
def test_a_fault_during_a_restart_leads_to_another_restart(role, number):
    """The engine is dead, and a process of its successor dies, or is stopped, while it loads."""
    with RestartingServer(KILL) as server:
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
@pytest.mark.parametrize(("role", "number"), [(API, KILL), ("worker 0.0", STOP)])
def test_fault_during_a_drain_stops_every_request_and_process(role, number):
    drain_seconds, endings = 12, API_SERVER_DIED if role == API else ENGINE_DIED
    server = RestartingServer(STOP, "--shutdown-timeout", str(drain_seconds))
    with server, at_stage(server, "generating") as held, ThreadPoolExecutor(1) as pool:
        ending, family = pool.submit(outcome_of, lambda: held), descendants(server.process.pid)
        with Load(server, [new_question() for _ in range(4)]) as load:
            load.wait_for("right", 1)
            asked_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: "stopping on SIGTERM" in server.log)
            victim, since = server.pids()[role], time.monotonic()  # both have work, or one API server has exited
            os.kill(victim, number)
            status = server.process.wait(drain_seconds + 30)
        assert not alive(victim)
        assert status == 0
        # Clients of a stopped process wait to the end; late requests find the port closed, or being closed.
        patience = since - asked_at + SOON + (drain_seconds if number == STOP else 0)
        late = [outcome for outcome in load.outcomes if outcome.begun >= asked_at]
        assert_right_or_ended(late, asked_at, patience, {*ENGINE_DIED, *API_SERVER_DIED})
        in_time = [ending.result(), *(outcome for outcome in load.outcomes if outcome.begun < asked_at)]
        assert_right_or_ended(in_time, asked_at, patience, {*ENGINE_DIED, *endings})
        server.assert_nothing_left(family)
