"""The ranks of several groups, run as a program by `test_spread_tower.py`: `job directory`, which holds `job.pt`:
{"checkpoints": {family: path}, "sizes": group sizes, "calls": {name: (patches, grids)}}. Writes `<size>.<rank>.pt`
there: per family and call the rows, and how many patches went through this rank's own tower."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mini_engine.model.parallel import TensorParallel
from mini_engine.model.spread_tower import SpreadTower
from mini_engine.model.weights import load_model


@torch.inference_mode()
def run_rank(directory: Path, job: dict, size: int, rank: int) -> None:
    store = dist.FileStore(str(directory / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    seen: list[int] = []
    results: dict = {}
    for family, path in job["checkpoints"].items():
        model = load_model(path, TensorParallel(rank, size), None, torch.device("cpu"), spread_tower=True)
        assert isinstance(model.visual, SpreadTower)
        model.visual.tower.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        for name, (patches, grids) in job["calls"].items():
            seen.clear()
            results[family, name] = {"rows": model.encode_vision(patches, grids), "seen": sum(seen)}
    torch.save(results, directory / f"{size}.{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    job = torch.load(directory / "job.pt", weights_only=False)
    for size in job["sizes"]:
        ranks = []
        for rank in range(size):
            ranks.append(os.fork())  # importing torch once is enough
            if not ranks[-1]:
                run_rank(directory, job, size, rank)
                os._exit(0)
        if any(os.waitpid(pid, 0)[1] for pid in ranks):
            sys.exit(f"a rank of {size} failed")


if __name__ == "__main__":
    main()
