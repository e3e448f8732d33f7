"""Child processes that do nothing of use, for tests of the supervision."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mini_engine.launch.process_group import ChildProcess, ProcessGroup
from mini_engine.log import LogSettings


@pytest.fixture
def processes(runtime) -> Iterator[ProcessGroup]:
    """Its children run `program.py`. The test's own signals are left alone."""
    read_end, write_end = os.pipe()
    made = ProcessGroup(runtime, LogSettings("info"), SimpleNamespace(fd=read_end, take=list), "tests.launch.program")
    yield made
    for child in made.children:
        ChildProcess.kill(child)
    while made.children:
        made.wait(None)
    made.close()
    os.close(read_end)
    os.close(write_end)


def make_unkillable(child: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> ChildProcess:
    """SIGKILL ends it as little as a process that waits in the kernel for a device that never answers.
    `end_unkillable` does."""
    monkeypatch.setattr(child, "kill", lambda: setattr(child, "killed_at", child.killed_at or time.monotonic()))
    return child


def end_unkillable(child: ChildProcess) -> None:
    ChildProcess.kill(child)
    child.reap()
