"""The kernels on the CPU, by Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.running_server import ROOT

pytest.importorskip("triton")

FILES = ["kernels/test_ops.py", "kernels/test_paged.py", "worker/test_triton_attention.py"]
FILES += ["worker/test_decode_graphs.py"]


def test_the_kernels_interpreted():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu and not slow", *(f"tests/{file}" for file in FILES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted to Python scalars" in run.stdout:
        pytest.skip("the interpreter of Triton 3.6 cannot loop with this numpy; run these tests on a device")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout, run.stdout
