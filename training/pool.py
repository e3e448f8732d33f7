"""The pool of rendered training items: made by background processes, kept on disk, drawn from in memory.

Chunk i holds the items of seeds i * CHUNK and up, so a pool is the same whoever makes it, and a resumed run reads what
is there instead of rendering it again.
"""

import os
import pickle
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from training.data import Item, make_item

CHUNK = 64


def make_chunk(index: int, path: Path) -> Path:
    """Render chunk `index` into a file; returns its path."""
    items = [make_item(index * CHUNK + offset) for offset in range(CHUNK)]
    partial = path.with_suffix(".part")
    partial.write_bytes(pickle.dumps(items))
    os.replace(partial, path)
    return path


def load_chunk(path: Path) -> list[Item]:
    """The items of a file that `make_chunk` wrote. Only for one's own files: unpickling runs code."""
    return pickle.loads(path.read_bytes())


class Pool:
    """Grows in the background up to `target` items; `wait_for` takes in what is ready, `draw` picks an item."""

    def __init__(self, folder: Path, target: int, workers: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.items: list[Item] = []
        self._executor = ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,))
        paths = [folder / f"{index:05d}.pickle" for index in range(max(1, target // CHUNK))]
        self._waiting = [self._chunk(index, path) for index, path in enumerate(paths)]

    def _chunk(self, index: int, path: Path) -> Future[Path]:
        """A file that is there takes no process, whose imports take seconds."""
        if not path.exists():
            return self._executor.submit(make_chunk, index, path)
        found: Future[Path] = Future()
        found.set_result(path)
        return found

    def wait_for(self, count: int) -> None:
        """Take in every chunk that is ready, and wait until `count` items are there, or all that will come."""
        while self._waiting and (len(self.items) < count or self._waiting[0].done()):
            self.items += load_chunk(self._waiting.pop(0).result())

    def draw(self, rng: np.random.Generator) -> Item:
        """One item, uniformly."""
        return self.items[int(rng.integers(len(self.items)))]

    def close(self) -> None:
        """Stop the background processes; chunks not yet begun are dropped."""
        self._executor.shutdown(cancel_futures=True)
