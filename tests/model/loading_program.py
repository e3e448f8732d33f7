"""Loads one rank's part, as a program: `rank size directory format [mapped]`. Prints as JSON the bytes of its
parameters and by how many its resident memory grew at most. `mapped` stands for `checkpoint.MAPPED_BYTES`, and runs of
rows are as much shorter."""

import json
import sys
from pathlib import Path

import torch

from mini_engine.model import checkpoint, weights
from mini_engine.model.parallel import TensorParallel


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    rank, size, directory, load_format, *mapped = sys.argv[1:]
    torch.set_num_threads(1)
    if mapped:
        weights.RUN_VALUES = weights.RUN_VALUES * int(mapped[0]) // checkpoint.MAPPED_BYTES
        checkpoint.MAPPED_BYTES = int(mapped[0])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here: proc(5)
    before = status("VmRSS")
    model = weights.load_model(directory, TensorParallel(int(rank), int(size)), None, torch.device("cpu"), load_format)
    grown = status("VmHWM") - before
    print(json.dumps({"held": sum(p.nbytes for p in model.parameters()), "grown": grown}))


if __name__ == "__main__":
    main()
