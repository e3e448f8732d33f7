"""A start that is interrupted, or loses a process, at each of its phases; a stop with hung requests; many of
both in a row; and a log that cannot be written."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from tests.e2e.asked import Asked, ask_small
from tests.e2e.asking import ENDLESS, TEXT, Asking
from tests.e2e.processes import alive, descendants
from tests.e2e.running_server import ROOT, RunningServer, message
from tests.e2e.waiting import FailPoint, eventually
from tests.faults.load import ask

# Fail points, in their order; each is in another process, or another part of its work.
PHASES = (
    "resolving-model", "binding-sockets", "creating-processes", "starting-child", "loading-api", "loading-worker",
    "loading-core", "warming-up", "listening",
)  # fmt: skip
TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
FAST = {("creating-processes", TERM), ("loading-worker", KILL), ("loading-api", INT)}
VICTIMS = ("api 0", "core 0", "worker 0.0", "worker 0.1")
FAST_DEATHS = {("worker 0.0", "loading-worker"), ("core 0", "loading-core")}


class Starting(RunningServer):
    """A server whose start is held at a fail point."""

    def __init__(self, phase: str, *flags: str):
        super().__init__(*flags)
        self.phase = phase

    def __enter__(self) -> Starting:
        self.launch(armed=self.phase)
        return self

    @property
    def point(self) -> FailPoint:
        return self.failpoint(self.phase)


def cells(fast: set, *axes: tuple) -> list:
    """Those that are not `fast` are slow."""
    return [
        pytest.param(
            *cell,
            marks=[] if cell in fast else [pytest.mark.slow],
            id="-".join(getattr(axis, "name", axis) for axis in cell),
        )
        for cell in itertools.product(*axes)
    ]


@pytest.mark.parametrize(("phase", "number"), cells(FAST, PHASES, (TERM, INT, KILL)))
def test_interrupted_start_leaves_nothing(phase, number):
    with Starting(phase) as server:
        held = server.point.wait()
        family = descendants(server.process.pid)
        server.process.send_signal(number)
        if held == server.process.pid:
            server.point.release()
        expected = {KILL: -KILL, TERM: 0, INT: 0}
        if phase == "resolving-model":  # nothing has to be stopped yet: an interrupt has its usual effect
            expected[INT] = 130
        assert server.process.wait(60) == expected[number], server.log
        server.assert_nothing_left(family)
        assert "Traceback" not in server.log


def victim_of(server: RunningServer, role: str) -> int:
    """Wait for a process that may be starting."""
    return eventually(lambda: server.pids().get(role, 0))


def flags_for(role: str) -> list[str]:
    return ["-tp", "2"] if role == "worker 0.1" else []


@pytest.mark.parametrize(
    ("role", "phase"), cells(FAST_DEATHS, VICTIMS, ("loading-api", "loading-worker", "loading-core"))
)
def test_death_during_first_start_fails_it_and_names_the_process(role, phase):
    """It names neither processes that exit because of it, nor a second start."""
    with Starting(phase, "--restart-engine", *flags_for(role)) as server:
        server.point.wait()
        victim, family = victim_of(server, role), descendants(server.process.pid)
        os.kill(victim, KILL)
        server.point.release()
        assert server.process.wait(60) == 1, server.log
        failure = next(line for line in server.log.splitlines() if "start failed: " in line)
        assert f"start failed: {role} (pid {victim}) died: killed by SIGKILL" in failure, server.log
        server.assert_nothing_left(family)


@pytest.mark.slow
@pytest.mark.parametrize("role", VICTIMS)
def test_hang_during_first_start_fails_it_and_names_the_process(role):
    """It does not name processes that only wait for it."""
    with Starting("loading-worker", "--startup-timeout", "30", *flags_for(role)) as server:
        server.point.wait()
        victim, family = victim_of(server, role), descendants(server.process.pid)
        os.kill(victim, signal.SIGSTOP)
        server.point.release()
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


@pytest.mark.parametrize(("number", "status"), [(TERM, 0), (INT, 130)])
def test_a_stop_does_not_wait_for_a_download(number, status, tmp_path):
    """From a hub that does not answer. A process 1, as in a container, has to handle a signal to get it."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(60)
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        with subprocess.Popen(
            [sys.executable, "serve.py", "some/model"], cwd=ROOT, stderr=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "0", **environ},
        ) as process:  # fmt: skip
            try:
                with hub.accept()[0]:
                    process.send_signal(number)
                    assert process.wait(60) == status
                assert b"Traceback" not in process.stderr.read()
            finally:
                process.kill()


@pytest.mark.parametrize(
    "role", ["core 0", *(pytest.param(role, marks=pytest.mark.slow) for role in ("api 0", "worker 0.0"))]
)
def test_a_second_signal_stops_a_server_with_a_hung_process(role):
    """With an endless request, and a process that is stopped: a second signal ends all at once."""
    with RunningServer("--shutdown-timeout", "600") as server:
        family = descendants(server.process.pid)
        asking = Asking(server, "api 0", TEXT, **ENDLESS)
        asking.read_events(1)
        os.kill(server.pids()[role], signal.SIGSTOP)
        server.process.send_signal(TERM)
        eventually(lambda: "stopping on SIGTERM" in server.log)
        assert server.process.poll() is None
        server.process.send_signal(TERM)
        assert server.process.wait(60) == 0
        server.assert_nothing_left(family)
        asking.hang_up()


@pytest.mark.slow
def test_ten_starts_and_stops_in_a_row_leave_nothing():
    one = ask_small(33_000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    before = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    for turn in range(10):
        with RunningServer("--port", port, "--api-server-count", "2") as server:  # the same port: it is free again
            assert ask(server, one).kind == "right"
            assert server.stop((TERM, INT)[turn % 2]) == 0
    assert (len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before


def test_unread_log_blocks_no_process():
    """Stderr is a pipe that is full, then one without a reader; and all along stdout is closed."""
    one = ask_small(33_003)
    with tempfile.TemporaryDirectory() as temporary:
        path = f"{temporary}/socket"
        process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "serve.py", "--uds", path, "--enable-log-requests"],
            cwd=ROOT, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": temporary},
        )  # fmt: skip
        try:
            while b" serving " not in process.stderr.readline():
                assert process.poll() is None
            for _ in range(3 * (64 << 10) // 60):
                assert b"200 OK" in over_unix_socket(path, b"GET /version HTTP/1.1")
            assert one.answer.encode() in chat_over_unix_socket(path, one)
            process.stderr.close()
            assert one.answer.encode() in chat_over_unix_socket(path, one)
            family = descendants(process.pid)
            process.send_signal(TERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
        eventually(lambda: not any(map(alive, family)))
        assert os.listdir(temporary) == []


def over_unix_socket(path: str, request: bytes, body: bytes = b"") -> bytes:
    """The whole response."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(path)
        lines = [request, b"Host: x", b"Connection: close", b"Content-Length: %d" % len(body)]
        head = b"\r\n".join([*lines, b"Content-Type: application/json", b"\r\n"])
        connection.sendall(head + body)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def chat_over_unix_socket(path: str, one: Asked) -> bytes:
    body = json.dumps({"messages": [message(one.text, one.urls)], "temperature": 0}).encode()
    return over_unix_socket(path, b"POST /v1/chat/completions HTTP/1.1", body)
