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

from mini_engine.demo.data import Item, make_item

CHUNK = 64


def chunk_path(index: int, folder: Path, base: int = 0) -> Path:
    """Where chunk `index` of the seeds from `base` on is kept."""
    return folder / f"{base}-{index:05d}.pickle"


def make_chunk(index: int, folder: Path, base: int = 0) -> Path:
    """Render chunk `index` (seeds from `base` on) into a file of `folder`, unless it is there; returns its path."""
    path = chunk_path(index, folder, base)
    if not path.exists():
        items = [make_item(base + index * CHUNK + offset) for offset in range(CHUNK)]
        partial = path.with_suffix(".part")
        partial.write_bytes(pickle.dumps(items))
        os.replace(partial, path)
    return path


def load_chunk(path: Path) -> list[Item]:
    """The items of a file that `make_chunk` wrote. Only for one's own files: unpickling runs code."""
    return pickle.loads(path.read_bytes())


class Pool:
    """Grows in the background up to `target` items; `poll` takes in what is ready, `draw` picks an item."""

    def __init__(self, folder: Path, target: int, workers: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.items: list[Item] = []
        self._executor = ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,))
        self._waiting: list[Future[Path]] = []
        for index in range(max(1, target // CHUNK)):
            if (path := chunk_path(index, folder)).exists():
                self.items += load_chunk(path)
            else:
                self._waiting.append(self._executor.submit(make_chunk, index, folder))

    def poll(self) -> None:
        """Take in every chunk that is ready; raises what its maker raised."""
        ready = [future for future in self._waiting if future.done()]
        self._waiting = [future for future in self._waiting if not future.done()]
        for future in ready:
            self.items += load_chunk(future.result())

    def wait_for(self, count: int) -> None:
        """Block until `count` items are there, or all that will come."""
        while len(self.items) < count and self._waiting:
            self.items += load_chunk(self._waiting.pop(0).result())

    def draw(self, rng: np.random.Generator) -> Item:
        """One item, uniformly."""
        return self.items[int(rng.integers(len(self.items)))]

    def close(self) -> None:
        """Stop the background processes; chunks not yet begun are dropped."""
        self._executor.shutdown(cancel_futures=True)
