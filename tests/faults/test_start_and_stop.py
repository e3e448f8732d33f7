"""A start that is interrupted at each of its phases, a stop with requests that are stuck, and many of both in a row."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.asked import Asked, ask_small
from tests.e2e.barriers import Inside, eventually, stopped
from tests.e2e.pinned import Asking
from tests.e2e.running_server import ROOT, RunningServer, descendants, message
from tests.faults.load import ask

# In their order; each is in another process, or another part of its work.
PHASES = (
    "resolving", "binding", "founding", "greeting", "loading-api", "loading-worker", "loading-core", "warming-up",
    "listening",
)  # fmt: skip
ENDLESS = {"max_tokens": 60_000, "ignore_eos": True, "stream": True}
FAST = {("founding", signal.SIGTERM), ("loading-worker", signal.SIGKILL), ("loading-api", signal.SIGINT)}


class Starting(RunningServer):
    """A server whose start is not waited for."""

    def _wait_for_url(self) -> str:
        return "http://127.0.0.1:1/v1"

    def __enter__(self) -> Starting:
        self._connect = lambda: None
        try:
            super().__enter__()
        except AttributeError:  # it asks nobody for models
            self.client = None
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.temporary.cleanup()


def cells():
    for phase, number in itertools.product(PHASES, (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)):
        marks = [] if (phase, number) in FAST else [pytest.mark.slow]
        yield pytest.param(phase, number, marks=marks, id=f"{phase}-{number.name}")


@pytest.mark.parametrize(("phase", "number"), list(cells()))
def test_a_start_that_is_interrupted_leaves_nothing(phase, number):
    with Inside() as inside, inside.barrier(phase) as barrier, Starting(environ=inside.environ) as server:
        held = barrier.wait_until_held()["pid"]
        family = descendants(server.process.pid)
        server.process.send_signal(number)
        if held == server.process.pid:
            barrier.let_go()
        status = server.process.wait(60)
        expected = {signal.SIGKILL: -number, signal.SIGTERM: 0, signal.SIGINT: 0}
        if phase == "resolving":  # nothing has to be stopped yet: an interrupt has its usual effect
            expected[signal.SIGINT] = 130
        assert status == expected[number], server.log
        server.assert_nothing_left(family)
        assert "Traceback" not in server.log


VICTIMS = ("api 0", "core 0", "worker 0.0", "worker 0.1")
FAST_DEATHS = {("worker 0.0", "loading-worker"), ("core 0", "loading-core")}


def pid_of(server: RunningServer, role: str) -> int:
    """Of a process that may just have been started."""

    def check() -> int:
        pid = server.pids().get(f"mini-engine: {role}")
        assert pid, f"no {role}\n{server.log}"
        return pid

    return eventually(check)


def first_failure(server: RunningServer) -> str:
    return next(line for line in server.log.splitlines() if "start failed: " in line)


def deaths():
    for role, phase in itertools.product(VICTIMS, ("loading-api", "loading-worker", "loading-core")):
        marks = [] if (role, phase) in FAST_DEATHS else [pytest.mark.slow]
        yield pytest.param(role, phase, marks=marks, id=f"{role}-{phase}")


@pytest.mark.parametrize(("role", "phase"), list(deaths()))
def test_a_death_in_the_first_start_ends_it_and_names_the_dead(role, phase):
    """Not one of those that end for want of it, nor is the start tried again."""
    flags = ["-tp", "2"] if role == "worker 0.1" else []
    with (
        Inside() as inside,
        inside.barrier(phase) as barrier,
        Starting("--restart-engine", *flags, environ=inside.environ) as server,
    ):
        barrier.wait_until_held()
        victim, family = pid_of(server, role), descendants(server.process.pid)
        os.kill(victim, signal.SIGKILL)
        barrier.let_go()
        assert server.process.wait(60) == 1, server.log
        assert f"start failed: {role} (pid {victim}) died: killed by SIGKILL" in first_failure(server), server.log
        server.assert_nothing_left(family)


@pytest.mark.slow
@pytest.mark.parametrize("role", VICTIMS)
def test_who_stands_still_in_the_first_start_ends_it_and_is_named(role):
    """Not one of those that only wait for it, who are not ready either."""
    flags = ["-tp", "2"] if role == "worker 0.1" else []
    with (
        Inside() as inside,
        inside.barrier("loading-worker") as barrier,
        Starting("--startup-timeout", "30", *flags, environ=inside.environ) as server,
    ):
        barrier.wait_until_held(90)
        victim, family = pid_of(server, role), descendants(server.process.pid)
        os.kill(victim, signal.SIGSTOP)
        barrier.let_go()
        assert server.process.wait(90) == 1, server.log
        why = f"{role} (pid {victim}) was killed: it was not ready after 30 s (--startup-timeout)"
        assert f"start failed: {why}" in first_failure(server), server.log
        assert server.log.count(" is killed: ") == 1 and f"{role} T" in server.log
        server.assert_nothing_left(family)


@pytest.mark.slow
def test_a_supervisor_that_stands_still_in_the_first_start_goes_on_with_it_and_blames_nobody():
    """Longer than a start may take; what its children say meanwhile is waited for."""
    one = ask_small(33_005)
    with (
        Inside() as inside,
        inside.barrier("loading-worker") as barrier,
        Starting("--startup-timeout", "30", environ=inside.environ) as server,
    ):
        barrier.wait_until_held(90)
        with stopped(server.process.pid):
            barrier.let_go()
            time.sleep(35)
        server.url = RunningServer._wait_for_url(server)
        assert ask(server, one).kind == "right"
        assert "is killed" not in server.log
        assert server.stop(signal.SIGTERM) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stop_in_the_pause_before_a_restart_leaves_nothing(number):
    with Inside() as inside, RunningServer("--restart-engine", environ=inside.environ) as server:
        with inside.barrier("backing-off") as barrier:
            family = descendants(server.process.pid)
            os.kill(server.pids()["mini-engine: core 0"], signal.SIGKILL)
            barrier.wait_until_held()
            server.process.send_signal(number)
        assert server.process.wait(30) == (-number if number == signal.SIGKILL else 0), server.log
        server.assert_nothing_left(family)
        assert "Traceback" not in server.log


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, of one file, whose first bytes are all that comes of it."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._begin(1 << 20, {"ETag": '"0"', "X-Repo-Commit": "0" * 40})

    def do_GET(self) -> None:
        if "/api/" in self.path:
            files = [{"type": "file", "path": "config.json", "size": 1 << 20, "oid": "0" * 40}]
            model = {"id": "some/model", "sha": "0" * 40, "siblings": [{"rfilename": "config.json"}]}
            body = json.dumps(files if "/tree/" in self.path else model).encode()
            self._begin(len(body), {})
            self.wfile.write(body)
            return
        self._begin(1 << 20, {})
        self.wfile.write(b"{")
        self.wfile.flush()
        self.server.body_is_on_its_way.set()
        self.server.over.wait()

    def log_message(self, *_: object) -> None:
        pass

    def _begin(self, length: int, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


@contextlib.contextmanager
def hub_that_says_nothing():
    """Its port, and what waits until it is asked."""
    with socket.socket() as hub, contextlib.ExitStack() as connected:
        hub.bind(("127.0.0.1", 0))
        hub.listen()
        hub.settimeout(60)
        yield hub.getsockname()[1], lambda: connected.enter_context(hub.accept()[0])


@contextlib.contextmanager
def hub_that_stands_still_in_a_file():
    """As above."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        hub.body_is_on_its_way, hub.over = threading.Event(), threading.Event()
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub.server_port, lambda: hub.body_is_on_its_way.wait(60) or pytest.fail("nobody asks for the file")
        finally:
            hub.over.set()
            hub.shutdown()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("a_hub", [hub_that_says_nothing, hub_that_stands_still_in_a_file])
def test_a_stop_does_not_wait_for_a_download(a_hub, number, status, tmp_path):
    """Not even for one that stands still, of which a thread waits for a file; and a process 1, as in a container, has
    to handle a signal to get it."""
    with a_hub() as (port, wait_until_asked):
        environ = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
        environ.pop("HF_HUB_OFFLINE", None)
        with subprocess.Popen(
            [sys.executable, "serve.py", "some/model"], cwd=ROOT, env=environ, stderr=subprocess.PIPE
        ) as process:
            try:
                wait_until_asked()
                process.send_signal(number)
                assert process.wait(60) == status
                assert b"Traceback" not in process.stderr.read()
            finally:
                process.kill()


@pytest.mark.parametrize(
    "role", ["core 0", *(pytest.param(role, marks=pytest.mark.slow) for role in ("api 0", "worker 0.0"))]
)
def test_a_stop_does_not_wait_for_who_is_stuck_longer_than_it_may(role):
    """With an endless request, and a process that stands still: a second signal ends all at once."""
    with RunningServer("--shutdown-timeout", "600") as server:
        family = descendants(server.process.pid)
        asking = Asking(server, "mini-engine: api 0", Asked("tell me", "", []), **ENDLESS)
        asking.read_events(1)
        os.kill(server.pids()[f"mini-engine: {role}"], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: assert_in("stopping on SIGTERM", server.log))
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        server.assert_nothing_left(family)
        asking.hang_up()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_stands_still_is_not_waited_for_longer_than_the_time_out(number):
    with RunningServer("--shutdown-timeout", "3") as server:
        family = descendants(server.process.pid)
        asking = Asking(server, "mini-engine: api 0", Asked("tell me", "", []), **ENDLESS)
        asking.read_events(1)
        for role in ("core 0", "worker 0.0", "api 0"):
            os.kill(server.pids()[f"mini-engine: {role}"], signal.SIGSTOP)
        server.process.send_signal(number)
        assert server.process.wait(30) == 0
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
            assert server.stop((signal.SIGTERM, signal.SIGINT)[turn % 2]) == 0
    assert (len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before


@pytest.mark.slow
def test_two_servers_do_not_see_each_other():
    one, another = ask_small(33_001), ask_small(33_002)
    with RunningServer("-tp", "2") as first:
        with RunningServer("-tp", "2") as second:
            assert [ask(first, one).kind, ask(second, another).kind] == ["right", "right"]
            assert [server.total("media_decodes_total") for server in (first, second)] == [1, 1]
            family = descendants(second.process.pid)
            os.kill(second.pids()["mini-engine: core 0"], signal.SIGKILL)
            assert second.process.wait(30) == 1
            second.assert_nothing_left(family)
        assert ask(first, another).kind == "right"


def test_a_log_that_nobody_reads_or_that_has_no_room_ends_nothing():
    """Stderr is a pipe that is full, then one without a reader; and all along stdout was closed."""
    one = ask_small(33_003)
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "serve.py", "--uds", f"{temporary}/socket", "--enable-log-requests"]
        process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" >&-', "sh", *command], cwd=ROOT, stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": temporary},
        )  # fmt: skip
        try:
            while b" serving " not in process.stderr.readline():
                assert process.poll() is None
            for _ in range(3 * (64 << 10) // 60):
                assert b"200 OK" in over(f"{temporary}/socket", b"GET /version HTTP/1.1")
            assert one.answer.encode() in over_chat(f"{temporary}/socket", one)
            process.stderr.close()
            assert one.answer.encode() in over_chat(f"{temporary}/socket", one)
            family = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
        eventually(lambda: assert_no_process(family))
        assert os.listdir(temporary) == []


def over(path: str, request: bytes, body: bytes = b"") -> bytes:
    """The whole response to a request on a unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(path)
        lines = [request, b"Host: x", b"Connection: close", b"Content-Length: %d" % len(body)]
        head = b"\r\n".join([*lines, b"Content-Type: application/json", b"\r\n"])
        connection.sendall(head + body)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def over_chat(path: str, one: Asked) -> bytes:
    body = json.dumps({"messages": [message(one.text, one.urls)], "temperature": 0}).encode()
    return over(path, b"POST /v1/chat/completions HTTP/1.1", body)


@pytest.mark.slow
def test_a_full_disk_for_the_log_ends_nothing():
    one = ask_small(33_004)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "socket")
        with open("/dev/full", "wb") as full:
            process = subprocess.Popen(
                [sys.executable, "serve.py", "--uds", str(path)], cwd=ROOT, stdout=full, stderr=full,
                env={**os.environ, "TMPDIR": temporary},
            )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    assert one.answer.encode() in over_chat(str(path), one)
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()


def assert_no_process(pids: list[int]) -> None:
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def assert_in(text: str, log: str) -> None:
    assert text in log, log
