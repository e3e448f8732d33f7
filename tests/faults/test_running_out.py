"""The host gives a process, or the whole server, no more descriptors."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.asked import Asked, ask_small
from tests.e2e.barriers import eventually
from tests.e2e.pinned import Asking, connect
from tests.e2e.running_server import ROOT, RunningServer, message
from tests.faults.ground import RECOVERY_SECONDS
from tests.faults.load import Load, ask
from tests.faults.test_death import assert_in
from tests.web import WebServer, response


def test_too_few_descriptors_are_refused_at_start_in_one_line():
    command = ["sh", "-c", 'ulimit -n 96; exec "$@"', "sh", sys.executable, "serve.py", "--port", "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "the open files limit is 96" in ended.stderr and "ulimit -n" in ended.stderr


@pytest.mark.slow
def test_a_supervisor_without_descriptors_replaces_the_dead_when_it_has_some():
    """Meanwhile the other API server serves everybody."""
    one = ask_small(34_000)
    flags = ["--api-server-count", "2", "--collective-timeout", "10"]
    with RunningServer(*flags) as server:
        supervisor = server.process.pid
        # As many as are open: a death gives back two, and a start takes more.
        open_now = len(os.listdir(f"/proc/{supervisor}/fd"))
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (open_now, 4096))
        os.kill(server.pids()["mini-engine: api 0"], signal.SIGKILL)
        eventually(lambda: assert_in("api 0 cannot be started now", server.log), 30)
        assert Asking(server, "mini-engine: api 1", one).answer() == one.answer
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (4096, 4096))
        eventually(lambda: assert_in("replacement ready", server.log), RECOVERY_SECONDS)
        assert Asking(server, "mini-engine: api 0", one).answer() == one.answer


@pytest.mark.slow
@pytest.mark.parametrize("role", ["core 0", "worker 0.0", "worker 0.1"])
def test_a_process_that_gets_no_more_descriptors_dies_not(role):
    """New videos come all along: each is served, by another way where its own needs a descriptor."""
    asked = [ask_small(34_100 + number) for number in range(30)]
    with RunningServer("-tp", "2", "--mm-processor-cache-type", "lru") as server:
        assert ask(server, asked[0]).kind == "right"
        pids = server.pids()
        open_now = len(os.listdir(f"/proc/{pids[f'mini-engine: {role}']}/fd"))
        resource.prlimit(pids[f"mini-engine: {role}"], resource.RLIMIT_NOFILE, (open_now, 4096))
        with Load(server, asked, clients=6) as load:
            load.wait_for("right", 30)
        assert not load.count("wrong") and not load.count("cut"), load.tally()
        resource.prlimit(pids[f"mini-engine: {role}"], resource.RLIMIT_NOFILE, (4096, 4096))
        assert server.pids() == pids
        assert ask(server, asked[1]).kind == "right"


def take_descriptors(pid: int) -> None:
    """From now on the process gets no further one; those that it has stay."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest = next(number for number in itertools.count() if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, 4096))


def ask_on(connection: http.client.HTTPConnection, one: Asked) -> tuple[int, str]:
    """The status, and the answer or the error's code, of a question on a connection that stays open."""
    body = {"messages": [message(one.text, one.urls)], "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    got = connection.getresponse()
    reply = json.loads(got.read())
    if got.status == 200:
        return 200, reply["choices"][0]["message"]["content"]
    assert got.headers["retry-after"] and "out of file descriptors" in reply["error"]["message"], reply
    return got.status, reply["error"]["code"]


@pytest.mark.slow
def test_an_api_server_that_gets_no_more_descriptors_blames_no_client(tmp_path):
    """Requests that need one are refused; others on open connections are served; new connections wait."""
    one, first, inline, waits = (ask_small(34_200 + number) for number in range(4))
    video = base64.b64decode(one.urls[0][1].partition(",")[2])
    Path(tmp_path, "a.mp4").write_bytes(video)
    flags = ["--allowed-local-media-path", str(tmp_path), "--allowed-media-domains", "127.0.0.1"]
    with (
        WebServer(response(video)) as web,
        RunningServer("--mm-processor-cache-type", "lru", *flags) as server,
        ThreadPoolExecutor() as pool,
    ):
        places = (f"file://{tmp_path}/a.mp4", f"http://127.0.0.1:{web.port}/a.mp4")
        local, remote = (Asked(one.text, one.answer, [("video_url", url)]) for url in places)
        connection, pids = connect(server, "mini-engine: api 0"), server.pids()
        assert ask_on(connection, first) == (
            200,
            first.answer,
        )  # libraries import some parts at the first
        take_descriptors(pids["mini-engine: api 0"])
        for item in (local, remote) * 3:
            assert ask_on(connection, item) == (503, "overloaded")
        assert ask_on(connection, inline) == (200, inline.answer)
        connection.request("GET", "/metrics")
        with connection.getresponse() as figures:
            assert figures.status == 503 and figures.read()
        waiting = pool.submit(ask, server, waits)
        time.sleep(2)  # a few attempts to accept its connection
        assert server.log.count("out of file descriptors: requests") == 1
        resource.prlimit(pids["mini-engine: api 0"], resource.RLIMIT_NOFILE, (4096, 4096))
        for item in (local, remote):
            assert ask_on(connection, item) == (200, one.answer)
        assert waiting.result().kind == "right"
        assert server.pids() == pids and "Traceback" not in server.log
        connection.close()
