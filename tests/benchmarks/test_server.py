"""The memory of a process and its descendants."""

import subprocess
import sys

from benchmarks.server import memory_mb, peak_memory


def test_memory_of_two_processes_has_their_shared_pages_once():
    shared, found = 64, dict[str, float]()  # in megabytes
    code = f"""
import mmap, os, sys
shared = mmap.mmap(-1, {shared} << 20)
os.fork()
shared[:: mmap.PAGESIZE] = bytes(len(shared) // mmap.PAGESIZE)
os.write(1, b"has it\\n")
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["has it\n"] * 2
        with peak_memory(process.pid, found):
            assert shared < memory_mb(process.pid) < 1.5 * shared
    assert shared < found["peak_memory_mb"] < 1.5 * shared
    assert memory_mb(process.pid) == 0, "it has exited"
