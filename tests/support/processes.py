"""Other processes, from outside: what /proc shows of them, waits for them, and how to hold one at a point."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

DECODER_DESCRIPTORS = 3  # of each decoder in its API server
T = TypeVar("T")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def parent(pid: int) -> int:
    """The process that started `pid`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(parent(int(entry)), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        queue += children.get(queue[0], [])
        found.append(queue.pop(0))
    return found[1:]


def decoders(pid: int) -> list[int]:
    """The decoder processes of an API server, those that start too. Other processes have none."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in children if b"decoder" in Path(f"/proc/{child}/cmdline").read_bytes()]


def descriptors(pid: int) -> int:
    """Open descriptors, without those of decoders, whose number varies."""
    return len(os.listdir(f"/proc/{pid}/fd")) - DECODER_DESCRIPTORS * len(decoders(pid))


def mappings(pid: int) -> int:
    """Mappings of the package's shared memory, without those of decoders."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:mini-engine" in line for line in maps) - len(decoders(pid))


def memory(pid: int, name: str) -> int:
    """Bytes, by a line of its status: `VmHWM` is the most that it ever had, `RssAnon` and `RssShmem` are parts of
    `VmRSS`, what it has."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)[1]) << 10


def has_socket(pid: int | None, inode: int) -> bool:
    """Whether the process has this socket open."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(fd) == f"socket:[{inode}]":
                    return True
    return False


def tcp_sockets() -> list[tuple[int, int, int]]:
    """Local port, remote port (0: it listens), and the inode once a process has it, of each TCP socket."""
    tables = Path("/proc/net").glob("tcp*")  # a kernel without IPv6 has one
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return [(int(fields[1][-4:], 16), int(fields[2][-4:], 16), int(fields[9])) for fields in lines]


def eventually(check: Callable[[], T], seconds: float = 60) -> T:
    """Wait until `check` is true, or raises no AssertionError; returns its result.

    Raises:
        AssertionError: it never is; where `check` raises one itself, its last one.
    """
    deadline = time.monotonic() + seconds
    pause = 0.01
    while True:
        try:
            result = check()
            if result or result is None:
                return result
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {result}"
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP the process while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class FailPoint:
    """A fail point of `mini_engine/failpoints.py`: armed while a block runs, it holds the first process to reach it."""

    def __init__(self, directory: Path, name: str):
        self._directory = directory
        self._name = name

    def __enter__(self) -> FailPoint:
        self.arm()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def arm(self) -> None:
        """Block the next process that reaches it."""
        (self._directory / f"{self._name}.armed").touch()

    def wait(self, seconds: float = 240) -> int:
        """The blocked process; waits for it."""
        (path,) = eventually(lambda: list(self._directory.glob(f"{self._name}.held.*")), seconds)
        return int(path.suffix[1:])

    def release(self) -> None:
        """Resume the blocked process, and block no other."""
        for path in self._directory.glob(f"{self._name}.*"):
            path.unlink()
