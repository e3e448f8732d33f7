"""One of two tensor-parallel ranks, run by `test_model_runner.py`: `rank checkpoint folder device backend`.

Executes the same steps as the test; writes the tokens that it reported to `rank<r>.pt`.
"""

import sys
from pathlib import Path

import torch

from mini_engine.config import EngineConfig
from mini_engine.messages import Init, MediaCachePlan, NewSequence, SamplingParams
from mini_engine.model.weights import load_model
from mini_engine.worker.attention import KVCache, SdpaBackend
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.worker import choose_device, join_group
from tests.worker import script, tiny

COUNT, NUM_BLOCKS, BLOCK_SIZE = 20, 256, 16


def requests_that_share(media: tiny.MemoryMedia) -> tuple[NewSequence, NewSequence]:
    """One prompt with two items, twice, every way of choosing its tokens switched on in the second."""
    (first,) = [new for new in tiny.mixed_requests(media) if new.request_id == "two"]
    sampling = SamplingParams(
        max_tokens=1 << 20, seed=8, temperature=0.9, top_k=100, top_p=0.95, min_p=0.001, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.1, logit_bias={5: 2.0}, stop_token_ids=[5], min_tokens=10, logprobs=2,
    )  # fmt: skip
    return first, NewSequence("second", first.prompt_token_ids, sampling, first.media)


def main() -> None:
    rank, checkpoint, folder = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    config = EngineConfig(tensor_parallel_size=2, device=sys.argv[4], distributed_backend=sys.argv[5])
    device = choose_device(config, 0, rank)
    init = Init(config, str(checkpoint), str(folder), [], [], [], MediaCachePlan("off", 0, ""))
    tp = join_group(init, 0, rank, device)
    model = load_model(checkpoint, tp, None, device)
    cache = KVCache.allocate(model.attention_shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, device)
    media, normalise = tiny.MemoryMedia(), Normalisation.from_dir(checkpoint)
    runner = ModelRunner(model, SdpaBackend(cache), media, normalise, tp)
    results: dict = {}
    for name, sampling in (("greedy", {}), ("sampled", {"temperature": 1.0, "seed": 5})):
        requests = tiny.mixed_requests(media, **sampling)
        results[name] = script.run(runner, script.write_steps(requests, COUNT, 64, BLOCK_SIZE, NUM_BLOCKS))
    whole = load_model(checkpoint, tp, None, device, spread_tower=True)
    steps = script.write_steps(tiny.mixed_requests(media), COUNT, 64, BLOCK_SIZE, NUM_BLOCKS)
    results["whole tower"] = script.run(ModelRunner(whole, SdpaBackend(cache), media, normalise, tp), steps)
    first, second = requests_that_share(media)
    results["shared"] = script.run(runner, script.share_prefix(first, second, 1, COUNT, BLOCK_SIZE))
    results["transformers"] = "transformers" in sys.modules
    torch.save(results, folder / f"rank{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
