"""Where tests of kernels run: on CUDA; or, in a process with `TRITON_INTERPRET=1`, on the CPU.

Triton reads that variable when a kernel is defined, so one process cannot do both: `test_interpreter.py` starts
another.
"""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu"] if INTERPRETED else [ON_CUDA]


def combinations(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All of them on a device; where kernels are interpreted, which is slow, enough that each value is in one."""
    if not INTERPRETED:
        return [*itertools.product(*values)]
    return [tuple(each[i % len(each)] for each in values) for i in range(max(map(len, values)))]
