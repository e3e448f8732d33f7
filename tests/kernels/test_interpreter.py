"""The kernels on the CPU, by Triton's interpreter, in processes of their own."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.running_server import ROOT

pytest.importorskip("triton")


def test_the_kernels_interpreted():
    # Two processes, of one thread each, take as long as each other: the imports of the second take longer.
    halves = [
        ["kernels/test_ops.py", "kernels/test_paged.py", "model/test_grouped_experts.py"],
        ["model/test_delta_rule.py", "matmul/test_triton_matmul.py", "worker/attention/test_decode_graphs.py"],
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu and not slow"]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # several would spin, for arrays this small
    environment = {**os.environ, **threads, "TRITON_INTERPRET": "1", "COLUMNS": "400"}  # wide: no summary is cut
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    runs = [
        subprocess.Popen([*command, *(f"tests/{file}" for file in files)], cwd=ROOT, env=environment, **pipes)
        for files in halves
    ]
    output = "".join(run.communicate()[0] for run in runs)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    # Triton 3.6, with a numpy that makes no scalar of an array of one element any more, cannot loop over a kernel's
    # values.
    cannot_loop = "only 0-dimensional arrays can be converted to Python scalars"
    assert all(cannot_loop in line for line in failed), output
    assert bool(failed) == any(run.returncode for run in runs) and not re.search(r"\d skipped", output), output
    if failed:
        pytest.skip(f"{len(failed)} of these tests need a device or another Triton, whose interpreter can loop")
