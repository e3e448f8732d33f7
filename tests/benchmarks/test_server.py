"""The memory of a process and its descendants."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.server import memory_mb, peak_memory

SHARED_MB = 64
TWO_PROCESSES = f"""
import mmap, os, sys
shared = mmap.mmap(-1, {SHARED_MB} << 20)
os.fork()
shared[:: mmap.PAGESIZE] = bytes(len(shared) // mmap.PAGESIZE)
os.write(1, b"has it\\n")
sys.stdin.read()
"""


def test_memory_of_two_processes_has_their_shared_pages_once():
    found: dict[str, float] = {}
    command = [sys.executable, "-c", TWO_PROCESSES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["has it\n"] * 2
        with peak_memory(process.pid, found):
            assert SHARED_MB < memory_mb(process.pid) < 1.5 * SHARED_MB
    assert SHARED_MB < found["peak_memory_mb"] < 1.5 * SHARED_MB
    assert memory_mb(process.pid) == 0, "it has exited"
