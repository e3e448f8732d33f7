"""A start that is interrupted, or loses a process, at each of its phases, and a stop with hung requests."""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.client import ENDLESS, TEXT, ClientRequest
from tests.support.processes import FailPoint, descendants, eventually
from tests.support.running_server import RunningServer

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
VICTIMS = ("api 0", "core 0", "worker 0.0", "worker 0.1")


@contextlib.contextmanager
def starting(phase: str, *flags: str) -> Iterator[tuple[RunningServer, FailPoint, int]]:
    """A server whose start is held at a fail point, that, and the process that has reached it."""
    server = RunningServer(*flags)
    server.launch(armed=phase)
    with contextlib.ExitStack() as stack:
        stack.push(server)
        point = server.failpoint(phase)
        yield server, point, point.wait()


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param(
            *cell,
            marks=()
            if cell in (("resolving-model", INT), ("creating-processes", TERM), ("loading-worker", KILL))
            else pytest.mark.slow,
        )
        for cell in itertools.product(
            (  # fail points, in their order; each is in another process, or another part of its work
                "resolving-model binding-sockets creating-processes starting-child loading-api loading-worker "
                "loading-core warming-up listening"
            ).split(),
            (TERM, INT, KILL),
        )
    ],
)
def test_interrupted_start_leaves_nothing(phase, number):
    with starting(phase) as (server, point, held):
        family = descendants(server.process.pid)
        server.process.send_signal(number)
        if held == server.process.pid:
            point.release()
        expected = {KILL: -KILL, TERM: 0, INT: 0}
        if phase == "resolving-model":  # nothing has to be stopped yet: an interrupt has its usual effect
            expected[INT] = 130
        assert server.process.wait(60) == expected[number], server.log
        server.assert_nothing_left(family)
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("role", "phase"),
    [
        pytest.param(*cell, marks=() if cell == ("worker 0.0", "loading-worker") else pytest.mark.slow)
        for cell in itertools.product(VICTIMS, ("loading-api", "loading-worker", "loading-core"))
    ],
)
def test_death_during_first_start_fails_it_and_names_the_process(role, phase):
    """It names neither processes that exit because of it, nor a second start."""
    flags = ["--restart-engine", *(["-tp", "2"] if role == "worker 0.1" else [])]
    with starting(phase, *flags) as (server, point, _):
        victim = eventually(lambda: server.pids().get(role) or False)
        family = descendants(server.process.pid)
        os.kill(victim, KILL)
        point.release()
        assert server.process.wait(60) == 1, server.log
        failure = next(line for line in server.log.splitlines() if "start failed: " in line)
        assert f"start failed: {role} (pid {victim}) died: killed by SIGKILL" in failure, server.log
        server.assert_nothing_left(family)


@pytest.mark.slow
@pytest.mark.parametrize("role", VICTIMS)
def test_hang_during_first_start_fails_it_and_names_the_process(role):
    """It does not name processes that only wait for it."""
    flags = ["--startup-timeout", "30", *(["-tp", "2"] if role == "worker 0.1" else [])]
    with starting("loading-worker", *flags) as (server, point, _):
        victim = eventually(lambda: server.pids().get(role) or False)
        family = descendants(server.process.pid)
        os.kill(victim, signal.SIGSTOP)
        point.release()
        assert server.process.wait(90) == 1, server.log
        why = f"{role} (pid {victim}) was killed: it was not ready after 30 s (--startup-timeout)"
        assert f"start failed: {why}" in server.log
        assert server.log.count(" is killed: ") == 1 and f"{role} T" in server.log
        server.assert_nothing_left(family)


@pytest.mark.slow
@pytest.mark.parametrize("number", [TERM, INT, KILL])
def test_stop_before_an_engine_restart_leaves_nothing(number):
    with RunningServer("--restart-engine") as server:
        with server.failpoint("restarting-engines") as point:
            family = descendants(server.process.pid)
            os.kill(server.pids()["core 0"], KILL)
            point.wait()
            server.process.send_signal(number)
        assert server.process.wait(30) == (-KILL if number == KILL else 0), server.log
        server.assert_nothing_left(family)
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    "role", ["core 0", *(pytest.param(role, marks=pytest.mark.slow) for role in ("api 0", "worker 0.0"))]
)
def test_a_second_signal_stops_a_server_with_a_hung_process(role):
    """With an endless request, and a process that is stopped: a second signal ends all at once."""
    with RunningServer("--shutdown-timeout", "600") as server:
        family = descendants(server.process.pid)
        request = ClientRequest(server, "api 0", TEXT, **ENDLESS)
        request.read_events(1)
        os.kill(server.pids()[role], signal.SIGSTOP)
        server.process.send_signal(TERM)
        eventually(lambda: "stopping on SIGTERM" in server.log)
        assert server.process.poll() is None
        server.process.send_signal(TERM)
        assert server.process.wait(60) == 0
        server.assert_nothing_left(family)
        request.hang_up()
