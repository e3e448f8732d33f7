import subprocess
import sys

PROBE = """
import ctypes, resource, sys, threading
from mini_engine.media.memory import keep_freed_memory

PR_SET_THP_DISABLE = 41  # one fault of a huge page stands for hundreds
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def work():
    for _ in range(20):
        held = [b"x" * (20 << 20), b"y" * (30 << 20), b"z" * (25 << 20)]
        del held

def in_a_thread():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

in_a_thread()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
in_a_thread()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROBE, mode], capture_output=True, check=True, text=True).stdout)


def test_memory_that_was_freed_is_used_again() -> None:
    assert faults("keep") < faults("leave") / 10
