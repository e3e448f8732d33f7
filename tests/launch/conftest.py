"""Child processes that do nothing of use, for tests of the supervision."""

from __future__ import annotations

import functools
import os
import select
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mini_engine.launch.process_group import ChildProcess, ProcessGroup
from mini_engine.log import LogSettings
from tests.e2e.waiting import eventually

PROGRAM = "tests.launch.program"


@pytest.fixture
def processes(runtime, monkeypatch) -> Iterator[ProcessGroup]:
    """Its children run `program.py`; the test's own signals are left alone. `kill` returns when the child is dead, but
    for an unkillable one."""
    monkeypatch.setattr(ChildProcess, "start", functools.partial(ChildProcess.start, module=PROGRAM))
    read_end, write_end = os.pipe()
    made = ProcessGroup(runtime, LogSettings("info"), SimpleNamespace(fd=read_end, take=list))
    children: list[ChildProcess] = []
    start = made.start

    def start_mortal(*args: object) -> ChildProcess:
        child = start(*args)
        kill = child._popen.kill
        child._popen.kill = lambda: (kill(), select.select([child.pidfd], [], [], 60))
        children.append(child)
        return child

    monkeypatch.setattr(made, "start", start_mortal)
    yield made
    for child in children:
        if child._popen.poll() is None:
            os.kill(child.pid, 9)
            child._popen.wait()
    for child in made.children:
        child.close()
    made.children.clear()
    made.close()
    os.close(read_end)
    os.close(write_end)


def make_unkillable(child: ChildProcess) -> ChildProcess:
    """SIGKILL ends it as little as a process that waits in the kernel for a device that never answers."""
    child._popen.kill = lambda: None
    return child


def wait_for_state(child: ChildProcess, letter: str) -> None:
    """Of proc(5)."""

    def check() -> None:
        assert child.state == letter

    eventually(check)
