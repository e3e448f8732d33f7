"""A child process keeps freed memory."""

import subprocess
import sys

PROBE = """
import ctypes, resource, sys, threading
from mini_engine.process_setup import keep_freed_memory
PR_SET_THP_DISABLE = 41  # a huge page would replace hundreds of faults
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
assert sys.argv[1] == "default" or keep_freed_memory()

def page_faults():
    work = lambda: [len([b"x" * (size << 20) for size in (20, 30, 25)]) for _ in range(20)]
    thread = threading.Thread(target=work)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

page_faults()
print(page_faults())
"""


def test_freed_memory_is_reused_without_page_faults() -> None:
    faults = [subprocess.check_output([sys.executable, "-c", PROBE, mode]) for mode in ("keep", "default")]
    assert int(faults[0]) < int(faults[1]) / 10
