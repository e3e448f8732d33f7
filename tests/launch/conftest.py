"""A family of processes that do nothing of use, for tests of those that look after them."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mini_engine.child_process import ChildProcess
from mini_engine.launch.family import Family
from mini_engine.log import LogSettings

PROGRAM = "tests.launch.program"


@pytest.fixture
def family(runtime, monkeypatch) -> Iterator[Family]:
    """Its children run `program.py`; the test's own signals are left alone."""
    monkeypatch.setattr(ChildProcess, "start", functools.partial(ChildProcess.start, module=PROGRAM))
    read_end, write_end = os.pipe()
    made = Family(runtime, LogSettings("info"), SimpleNamespace(fd=read_end, take=list))
    children: list[ChildProcess] = []
    start = made.start
    monkeypatch.setattr(made, "start", lambda *args: children.append(start(*args)) or children[-1])
    yield made
    for child in children:
        if child._popen.poll() is None:
            os.kill(child.pid, 9)
            child._popen.wait()
        if not child.output.closed:
            child.close()
    made.children.clear()
    made.close()
    os.close(read_end)
    os.close(write_end)


def make_unkillable(child: ChildProcess) -> ChildProcess:
    """SIGKILL ends it as little as a process that waits in the kernel for a device that never answers."""
    child._popen.kill = lambda: None
    return child
