"""One of two tensor-parallel ranks, run by `test_model_runner.py`: `rank checkpoint folder`.

Executes the same steps as the test; writes the tokens that it reported, and those that it keeps, to `rank<r>.pt`.
"""

import sys
from pathlib import Path

import torch

from mini_engine.config import EngineConfig
from mini_engine.messages import Init
from mini_engine.model.weights import load_model
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.worker import join_group
from tests.worker import script, tiny

COUNT, NUM_BLOCKS, BLOCK_SIZE = 20, 256, 16


def main() -> None:
    rank, checkpoint, folder = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    config = EngineConfig(tensor_parallel_size=2)
    tp = join_group(Init(config, str(checkpoint), str(folder), [], [], []), 0, rank, torch.device("cpu"))
    model = load_model(checkpoint, tp, None, torch.device("cpu"))
    cache = KVCache.allocate(model.attention_shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    media = tiny.MemoryMedia()
    runner = ModelRunner(model, cache, media, Normalisation.from_dir(checkpoint), tp)
    results = {}
    for name, sampling in (("greedy", {}), ("sampled", {"temperature": 1.0, "seed": 5})):
        requests = tiny.mixed_requests(media, **sampling)
        *steps, last = script.write_steps(requests, COUNT, 64, BLOCK_SIZE, NUM_BLOCKS)
        results[name] = script.run(runner, steps)
        results["kept"] = [state.tokens.array.tolist() for state in runner._sequences.values()]
        runner.execute(last)
    results["transformers"] = "transformers" in sys.modules
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
