"""The ranks of a tensor-parallel group: `run_ranks`, and the program that it starts, `size directory`.

They are forked from one process, which has loaded torch once for all, and die with it.

The directory holds `job.pt`: {"checkpoints": {name: (path, prompts)}, "towers": {name: path}, "calls": {name: (patches,
grids)}}. Writes `rank<r>.pt` there: by name of the checkpoint the logits of the batch of prompts, whole, in steps of a
few tokens of each, and in bfloat16; by name of the tower and of the call the rows of a tower that is whole on each
rank, and how many patches went through this rank's own.
"""

import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mini_engine.launch.process_setup import die_with_parent
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.towers.spread_tower import SpreadTower
from mini_engine.model.weights import load_model
from tests.model.reference import Prompt, in_dtype, reference_logits

CHUNK = 50  # tokens of a prompt in a step: ends inside of items
CPU = torch.device("cpu")


def run_ranks(size: int, directory: Path, job: dict) -> tuple[tuple[dict, dict], ...]:
    """What each rank writes for `job.pt`."""
    torch.save(job, directory / "job.pt")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.model.rank_program", str(size), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stderr
    return tuple(torch.load(directory / f"rank{rank}.pt") for rank in range(size))


def run(path: Path, batch: list[Prompt], tp: TensorParallel) -> dict[str, list[Tensor]]:
    model, narrow = (load_model(path, tp, dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
    return {
        "batch": reference_logits(model, batch),
        "chunked": reference_logits(model, batch, CHUNK),
        "bfloat16": reference_logits(narrow, [in_dtype(prompt, torch.bfloat16) for prompt in batch]),
    }


def run_tower(path: Path, calls: dict, tp: TensorParallel) -> dict[str, tuple[list[Tensor], int]]:
    model = load_model(path, tp, None, CPU, spread_tower=True)
    assert isinstance(model.visual, SpreadTower)
    seen: list[int] = []
    model.visual.tower.patch_embed.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    results: dict[str, tuple[list[Tensor], int]] = {}
    for name, (patches, grids) in calls.items():
        before = sum(seen)
        own = torch.cat(list(model.own_patches(patches.split([t * h * w for t, h, w in grids]), grids)))
        results[name] = model.encode_vision(own, grids), sum(seen) - before
    return results


@torch.inference_mode()
def serve(rank: int, size: int, directory: Path, parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    job = torch.load(directory / "job.pt", weights_only=False)
    init = f"file://{directory / 'init'}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    tp = TensorParallel(rank, size)
    results = {name: run(path, prompts, tp) for name, (path, prompts) in job["checkpoints"].items()}
    towers = {name: run_tower(path, job["calls"], tp) for name, path in job["towers"].items()}
    torch.save((results, towers), directory / f"rank{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    size, directory = int(sys.argv[1]), Path(sys.argv[2])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=serve, args=(rank, size, directory, os.getpid())) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
