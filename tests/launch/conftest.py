"""Child processes that do nothing of use, for tests of the supervision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mini_engine.launch.process_group import ProcessGroup
from mini_engine.log import LogSettings


@pytest.fixture
def processes(runtime) -> Iterator[ProcessGroup]:
    """Its children run `program.py`. The test's own signals are left alone."""
    read_end, write_end = os.pipe()
    made = ProcessGroup(runtime, LogSettings("info"), SimpleNamespace(fd=read_end, take=list), "tests.launch.program")
    yield made
    for child in made.children:
        child.kill()
    while made.children:
        made.wait(60)
    made.close()
    os.close(read_end)
    os.close(write_end)
