"""Regime `attention`: all forms give the same, and what is printed is what was measured."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mini_engine.bench import attention
from mini_engine.bench.report import BenchError
from tests.e2e.running_server import ROOT


def test_the_rows_and_the_last_line():
    command = [sys.executable, "bench.py", "attention", "--sequences", "3", "--repeats", "2"]
    bench = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert bench.returncode == 0, bench.stderr
    lines = bench.stdout.splitlines()
    rows = json.loads(lines[-1])["figures"]["rows"]
    keys = [(dtype, form) for dtype in attention.DTYPES for form in ("gathered", "enable_gqa", "padded")]
    assert [(row["dtype"], row["form"]) for row in rows] == keys
    for row in rows:
        shown = next(line.split() for line in lines if line.split()[:2] == [row["dtype"], row["form"]])
        assert float(shown[2]) == row["ms"] > 0


def test_a_form_with_another_result_is_no_result(monkeypatch):
    forms = attention.make_forms

    def spoilt(*arguments):
        made = forms(*arguments)
        return made | {"padded": lambda: made["gathered"]() + 1}

    monkeypatch.setattr(attention, "make_forms", spoilt)
    with pytest.raises(BenchError, match="padded"):
        attention.measure("float32", 2, 1)
