"""What /proc shows of processes, from outside."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

DECODER_DESCRIPTORS = 3  # of each decoder in its API server


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
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
    """Local port, remote port, and the inode once a process has it, of each TCP socket."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [(int(fields[1][-4:], 16), int(fields[2][-4:], 16), int(fields[9])) for fields in lines]


def is_mapped(name: str) -> bool:
    """Whether a living process maps this name of /dev/shm."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and f"/dev/shm/{name}" in Path(f"/proc/{entry}/maps").read_text():
                return True
    return False
