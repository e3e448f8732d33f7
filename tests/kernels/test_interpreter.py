"""The kernels on the CPU, by Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.running_server import ROOT

pytest.importorskip("triton")


def test_the_kernels_interpreted():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu and not slow", "tests/kernels"]
    command += [f"--ignore=tests/kernels/{name}" for name in ("test_interpreter.py", "test_compiled.py")]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout, run.stdout
