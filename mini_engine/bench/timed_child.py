"""A child process as the supervisor starts it, but for stopwatches around the model of a worker.

The seconds go to a small file that the benchmark maps as well: so the model's time is that inside the running engine,
with all that works beside it. What the stopwatches cost, about 2 us a step, counts as the engine's own.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mini_engine import child

FILE_VARIABLE = "MINI_ENGINE_BENCH_MODEL_TIME"
TOTALS = struct.Struct("dd")  # seconds on the clock, and of the thread on a CPU


def create(path: Path) -> None:
    """An empty file of totals."""
    path.write_bytes(bytes(TOTALS.size))


def read(path: Path) -> tuple[float, float]:
    """Seconds on the clock and on a CPU so far."""
    wall, cpu = TOTALS.unpack(path.read_bytes())
    return wall, cpu


def run(process: child.Child) -> None:
    """Main function of a worker process: the worker's own, its model under stopwatches."""
    from mini_engine.bench.worker_alone import MODEL_PARTS
    from mini_engine.model.vision_language import VisionLanguageModel
    from mini_engine.worker import worker

    with Path(os.environ[FILE_VARIABLE]).open("r+b") as file:
        totals = mmap.mmap(file.fileno(), TOTALS.size)
    for part in MODEL_PARTS:
        setattr(VisionLanguageModel, part, _timed(getattr(VisionLanguageModel, part), totals))
    worker.run(process)


def _timed(function: Callable[..., Any], totals: mmap.mmap) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            before = TOTALS.unpack_from(totals)
            TOTALS.pack_into(totals, 0, before[0] + time.perf_counter() - wall, before[1] + time.thread_time() - cpu)

    return call


if __name__ == "__main__":
    child.ROLE_MODULES["worker"] = __spec__.name
    child.main()
