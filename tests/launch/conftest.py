"""Child processes that do nothing of use, for tests of the supervision."""

import os
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from mini_engine.config import EngineConfig
from mini_engine.launch import child as child_module
from mini_engine.launch.child import ChildSpec
from mini_engine.launch.child_processes import ChildProcess, ProcessGroup


def run_role(spec: ChildSpec) -> None:
    """In the place of a role: exit, sleep, spin or read, by the index."""
    behaviour = spec.index.rpartition(".")[2]  # behind the engine's number, if there is one
    if behaviour == "fails":
        sys.exit(1)
    if behaviour == "sleeps":
        time.sleep(600)
    if behaviour == "reads":
        sys.exit(int(os.read(0, 10)))
    while behaviour == "spins":
        pass


@pytest.fixture
def make_processes(runtime, monkeypatch) -> Iterator[Callable[[EngineConfig], ProcessGroup]]:
    """A group with this configuration, whose children run `run_role`. The test's own signals are left alone."""
    monkeypatch.setattr(child_module, "run_role", run_role)
    no_signals = os.eventfd(0)
    made: list[ProcessGroup] = []

    def make(config: EngineConfig) -> ProcessGroup:
        made.append(ProcessGroup(config, runtime, no_signals))
        return made[0]

    yield make
    for group in made:
        for child in group.children:
            ChildProcess.kill(child)  # a test may have replaced its own
            child.reap()
        group.close()
    os.close(no_signals)


@pytest.fixture
def processes(make_processes) -> ProcessGroup:
    return make_processes(EngineConfig())
