"""What a child writes costs the supervisor a bounded time, and a bounded memory."""

from __future__ import annotations

import select
import time

import pytest

from mini_engine import child_process
from mini_engine.child_process import READ_BYTES
from mini_engine.launch.family import Died


class Written:
    """In the place of this process's own output."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, lines: bytes) -> None:
        self.parts.append(lines)


@pytest.fixture
def written(monkeypatch) -> Written:
    made = Written()
    monkeypatch.setattr(child_process, "output", made)
    return made


@pytest.mark.parametrize("writes", ["lines", "no-line"])
def test_one_that_writes_without_pause_is_read_a_bit_at_a_time(writes, family, written):
    child = family.start("worker", writes, 1)
    deadline = time.monotonic() + 60
    while sum(map(len, written.parts)) < 10 * READ_BYTES:
        assert time.monotonic() < deadline
        select.select([child.output], [], [], 10)
        time.sleep(0.002)  # so that the pipe is full
        child.forward_output()
        assert len(child._partial) <= READ_BYTES
    assert max(map(len, written.parts)) <= 2 * READ_BYTES + 1
    assert all(part.endswith(b"\n") for part in written.parts)


def test_who_closes_its_output_and_lives_is_still_waited_for_without_spinning(family):
    child = family.start("worker", "closes", 1)
    deadline = time.monotonic() + 60
    while not child.output_ended:
        assert time.monotonic() < deadline
        assert family.wait(1) == []
    begun = time.monotonic()
    assert family.wait(0.5) == [] and time.monotonic() - begun >= 0.5
    child.kill()
    assert family.wait(60) == [Died(child, "died: killed by SIGKILL", True)]
