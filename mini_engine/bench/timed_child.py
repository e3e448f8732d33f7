"""A child process as the supervisor starts it, but for a stopwatch around the model of a worker.

The seconds go to a small file that the benchmark maps as well: so the model's time is that inside the running engine,
with all that works beside it. What the stopwatch costs, about 2 us a step, counts as the engine's own.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from mini_engine import child
from mini_engine.bench.stopwatch import Stopwatch

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
    """Main function of a worker process: the worker's own, its model under a stopwatch."""
    from mini_engine.bench.worker_alone import MODEL_PARTS
    from mini_engine.model.vision_language import VisionLanguageModel
    from mini_engine.worker import worker

    with Path(os.environ[FILE_VARIABLE]).open("r+b") as file:
        stopwatch = _Shown(mmap.mmap(file.fileno(), TOTALS.size))
    for part in MODEL_PARTS:
        setattr(VisionLanguageModel, part, stopwatch.wrap(getattr(VisionLanguageModel, part)))
    worker.run(process)


class _Shown(Stopwatch):
    """One whose seconds stand in `totals` as well."""

    def __init__(self, totals: mmap.mmap):
        super().__init__()
        self._totals = totals

    def add(self, wall: float, cpu: float) -> None:
        super().add(wall, cpu)
        TOTALS.pack_into(self._totals, 0, self.wall, self.cpu)


if __name__ == "__main__":
    child.ROLE_MODULES["worker"] = __spec__.name
    child.main()
