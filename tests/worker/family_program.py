"""The two ranks of one engine on a family's checkpoint, run as a program by `test_families.py`: `checkpoint family out
budget`. Writes the tokens of the batch of mixed requests to `out`, as JSON; rank 1 reports none."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mini_engine.model.parallel import TensorParallel
from mini_engine.model.weights import load_model
from tests.worker import tiny
from tests.worker.test_families import run


def run_rank(rank: int) -> None:
    folder, family, out, budget = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    store = dist.FileStore(f"{out}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    tp, media = TensorParallel(rank, 2), tiny.MemoryMedia()
    model = load_model(folder, tp, None, torch.device("cpu"))
    tokens = run(model, folder, tiny.mixed_requests(media, family), media, budget, tp=tp)
    if rank == 0:
        out.write_text(json.dumps(tokens))
    assert rank == 0 or tokens == {}
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())  # importing torch once is enough
        if not ranks[-1]:
            run_rank(rank)
            os._exit(0)
    if any(os.waitpid(pid, 0)[1] for pid in ranks):
        sys.exit("a rank failed")


if __name__ == "__main__":
    main()
