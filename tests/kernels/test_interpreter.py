"""The kernels on the CPU, by Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys

import pytest

from tests.support.running_server import ROOT

pytest.importorskip("triton")

FILES = [
    "kernels/test_ops.py",
    "kernels/test_paged.py",
    "worker/attention/test_decode_graphs.py",
    "model/test_delta_rule.py",
]

# Triton 3.6, with a numpy that makes no scalar of an array of one element any more, cannot loop over a kernel's values.
CANNOT_LOOP = "only 0-dimensional arrays can be converted to Python scalars"


def test_the_kernels_interpreted():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu and not slow", *(f"tests/{file}" for file in FILES)]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # several would spin, for arrays this small
    environment = {**os.environ, **threads, "TRITON_INTERPRET": "1", "COLUMNS": "400"}  # wide: no summary is cut
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    assert all(CANNOT_LOOP in line for line in failed) and bool(failed) == bool(run.returncode), run.stdout + run.stderr
    assert "skipped" not in run.stdout, run.stdout
    if failed:
        pytest.skip(f"{len(failed)} of these tests need a device or another Triton, whose interpreter can loop")
