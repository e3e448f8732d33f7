"""Child processes that do nothing of use, for tests of the supervision."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from mini_engine.config import EngineConfig
from mini_engine.launch import child_processes
from mini_engine.launch.child_processes import ProcessGroup


@pytest.fixture
def make_processes(runtime, monkeypatch) -> Iterator[Callable[[EngineConfig], ProcessGroup]]:
    """A group with this configuration, whose children run `program.py`. The test's own signals are left alone."""
    monkeypatch.setattr(child_processes, "CHILD", "tests.launch.program")
    no_signals = os.eventfd(0)
    made: list[ProcessGroup] = []

    def make(config: EngineConfig) -> ProcessGroup:
        made.append(ProcessGroup(config, runtime, no_signals))
        return made[0]

    yield make
    for group in made:
        for child in group.children:
            child.kill()
            child.popen.kill()  # where a test has replaced the line above
        while group.children:
            group.wait()
        group.close()
    os.close(no_signals)


@pytest.fixture
def processes(make_processes) -> ProcessGroup:
    return make_processes(EngineConfig())
