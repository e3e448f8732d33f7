"""The first steps of a child process."""

import resource
import subprocess
import sys

import pytest

HARD_LIMIT = resource.getrlimit(resource.RLIMIT_CORE)[1]


@pytest.mark.parametrize(("before", "limit"), [("", int(HARD_LIMIT != 0)), ("ulimit -c 0; ", 0)])
def test_an_expendable_process_leaves_no_core_dump_whatever_its_limit(before, limit):
    """Without privileges a hard limit cannot be raised."""
    code = "import resource; from mini_engine.launch.process_setup import be_expendable; be_expendable(); "
    code += "print(open('/proc/self/oom_score_adj').read().strip(), *resource.getrlimit(resource.RLIMIT_CORE))"
    shell = ["sh", "-c", f'{before}exec "$@"', "sh", sys.executable, "-c", code]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == f"1000 {limit} {limit}\n"
