"""The ranks of a tensor-parallel group, run as a program by `test_tensor_parallel.py`: `size job`.

They are forked from one process, which has loaded torch once for all, and die with it.

`job` is a directory with `job.pt`, {"init": url, "checkpoints": {name: (path, {name: Prompt})}}. Writes `rank<r>.pt`
there: per checkpoint the logits of every prompt alone, of all in one batch, of all in steps of a few tokens of each, of
the batch after the last rank's part of the vision tower was zeroed, and after all of its part was; and those of the
batch in bfloat16.
"""

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mini_engine.model.layers import pieces_of
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.weights import load_model
from mini_engine.process_setup import die_with_parent
from tests.model.chunks import chunked_logits, in_dtype
from tests.model.reference import reference_logits

CHUNK = 29  # tokens of a prompt in a step: ends inside of items


@torch.inference_mode()
def run(path: Path, prompts: dict, tp: TensorParallel) -> dict[str, list[Tensor]]:
    batch = list(prompts.values())
    model = load_model(path, tp, None, torch.device("cpu"))
    results = {name: reference_logits(model, [prompt]) for name, prompt in prompts.items()}
    results["batch"] = reference_logits(model, batch)
    results["chunked"] = chunked_logits(model, batch, CHUNK)
    for name, part in (("zeroed tower", model.visual), ("zeroed", model)):
        if tp.rank == tp.size - 1:
            for piece in pieces_of(part):
                # What is whole on every rank is not its part.
                if piece.target.shape != piece.shape:
                    piece.target.zero_()
        results[name] = reference_logits(model, batch)
    narrow = load_model(path, tp, torch.bfloat16, torch.device("cpu"))
    results["bfloat16"] = reference_logits(narrow, [in_dtype(prompt, torch.bfloat16) for prompt in batch])
    return results


def serve(rank: int, size: int, directory: Path, parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    job = torch.load(directory / "job.pt", weights_only=False)
    dist.init_process_group("gloo", init_method=job["init"], rank=rank, world_size=size, timeout=timedelta(seconds=300))
    tp = TensorParallel(rank, size)
    results: dict = {name: run(path, prompts, tp) for name, (path, prompts) in job["checkpoints"].items()}
    results["broadcast"] = tp.broadcast(torch.tensor([float(rank + 1)]))
    results["gathered"] = tp.all_gather(torch.tensor([rank, rank + 10]))
    torch.save(results, directory / f"rank{rank}.pt")
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
