"""The host gives a process, or the whole server, no more descriptors."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import pytest

from tests.e2e.asked import ask_small
from tests.e2e.barriers import eventually
from tests.e2e.pinned import Asking
from tests.e2e.running_server import ROOT, RunningServer
from tests.faults.ground import RECOVERY_SECONDS
from tests.faults.load import Load, ask
from tests.faults.test_death import assert_in


def test_too_few_descriptors_are_refused_at_start_in_one_line():
    command = ["sh", "-c", 'ulimit -n 96; exec "$@"', "sh", sys.executable, "serve.py", "--port", "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "may have 96 open files here" in ended.stderr and "ulimit -n" in ended.stderr


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
        eventually(lambda: assert_in("serves in the place of", server.log), RECOVERY_SECONDS)
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
