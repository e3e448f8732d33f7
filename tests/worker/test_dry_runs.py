"""A worker's start, then prompts and decode steps of its real `ModelRunner`, on the device of `fake_cuda.py`: no hidden
wait, no operands on both sides, no kernel first compiled while requests are served, no more memory than is reserved.

With -s each run prints its launches: Triton's kernels, and operators that are neither views nor copies from the host.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from benchmarks.gpu_check import SAMPLING, grammars, requests, shorten
from benchmarks.runner import CONFIGS, checkpoint, decode, made_up_media, plain_requests, take
from mini_engine.config import BUNDLED_MODEL, ConfigError
from mini_engine.launch.cli import parse
from mini_engine.messages import MediaCachePlan, NewSequence
from mini_engine.model.config import ModelConfig
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.quantization import Quantization
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker import cache_sizes as memory
from mini_engine.worker import worker
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from tests.support.devices import INTERPRETED
from tests.worker import script

pytest.importorskip("triton")
from tests.worker.fake_cuda import DEVICE, Device, device  # noqa: E402

__all__ = ["device"]
pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that does not exist")

PIXELS = ("--mm-processor-kwargs", '{"size": {"shortest_edge": 3136, "longest_edge": 12845056}}')  # the hub's
NO_MEDIA = ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']


def start(flags: list[str], rank: int) -> tuple[ModelRunner, ModelConfig, memory.MemoryUse]:
    """As `worker._run`."""
    config = parse([*flags, *PIXELS, "--max-num-seqs", "16"])
    size, check = config.tensor_parallel_size, Tensor.is_contiguous
    gather = lambda _, tensor: check(tensor)  # noqa: E731
    others: Any = SimpleNamespace(all_reduce=check, broadcast=check, all_gather=gather, gather=gather)
    tp = TensorParallel(rank, size, others)
    held = Quantization.choose(config.quantization, config.quantize_head, None, None)
    at = Placement(tp, torch.bfloat16, DEVICE, config.mm_encoder_tp_mode == "data", held)
    model = VisionLanguageModel(ModelConfig.from_dir(config.model), at).eval()

    def received(patches: Tensor) -> Tensor:  # as `PinnedMemory.to_device`
        return torch.empty(patches.shape, dtype=patches.dtype, device=DEVICE)

    def runner_with(size: memory.CacheSize) -> ModelRunner:
        attention = worker.make_attention(config, model, worker.choose_backend("auto", DEVICE), size)
        graphs, normalise = worker.make_graphs(config, model, attention), Normalisation.from_dir(config.model)
        return ModelRunner(model, attention, made_up_media(), normalise, tp, received, graphs)

    one_block = runner_with(memory.CacheSize(1, 1))
    use = memory.profile(config, config.model, MediaCachePlan("off", 0, ""), model.config, one_block)
    del one_block
    runner = runner_with(worker.choose_cache_size(config, model, use))
    worker.record_graphs(runner)
    worker.warm_up(runner, model.config, size)
    return runner, model.config, use


def serve(name: str, runner: ModelRunner, model: ModelConfig, kinds: Sequence[str], device: Device) -> None:
    """Steps of all kinds; prints launches."""

    def count(new: Sequence[NewSequence], cached: int, begin: int, steps: int) -> str:
        with contextlib.closing(decode(runner, new, cached)) as launched:
            take(launched, begin)
            before, device.ahead = Counter(device.launches), begin > 0
            take(launched, steps)
            device.ahead = False
            return ", ".join(f"{(device.launches - before)[what] / steps:.0f} {what}" for what in device.launches)

    # All at once: chunks beside single tokens, and preemption.
    steps = script.write_steps(requests(model.vision, *kinds), 12, 100, runner.block_size, 256, preempt_at=(3, 12))
    script.run(runner, steps, ahead=1)
    longest = model.text.max_position_embeddings
    print(f"\n{name}: 2,048 tokens of prefill", count(plain_requests(1, 2048), 0, 0, 1))
    print("  100 tokens after a long prefix", count(plain_requests(1, longest - 100), longest - 200, 0, 1))
    for kind in kinds:
        [new] = requests(model.vision, kind)
        three = [msgspec.structs.replace(new, request_id=f"{kind} {number}") for number in range(3)]
        print(f"  a decode step, {kind}:", count(three, 0, 2, 10))  # most go on in a new block


def test_a_kv_cache_beyond_the_device_is_refused_before_the_worker_loads_something(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "choose_device", lambda *_: DEVICE)
    init = SimpleNamespace(config=parse(["--kv-cache-memory-bytes", "80G"], {}), model_dir=BUNDLED_MODEL)
    child: Any = SimpleNamespace(init=lambda: init, index="0.0")
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes: a KV cache of 80.0 GiB .* does not fit, 80.0 GiB"):
        worker._run(child)
    assert not device.used


EVERY = [path.stem for path in sorted(CONFIGS.glob("*.json"))]
DATA = ["--mm-encoder-tp-mode", "data"]
TWO_LAYERS = [
    ("Qwen2-VL-2B-Instruct", 2, 1, []), ("Qwen2.5-VL-7B-Instruct", 4, 0, DATA),
    ("Qwen3-VL-4B-Instruct", 1, 0, NO_MEDIA), ("Qwen3-VL-4B-Instruct", 2, 0, ["-q", "int4"]),
    ("Qwen3.5-4B", 1, 0, ["-q", "int8"]),
    ("Qwen3-VL-30B-A3B-Instruct", 4, 0, []), ("Qwen3.5-35B-A3B", 1, 0, ["-q", "int4"]),
]  # fmt: skip
ALL_LAYERS = [(name, size, 0, flags) for name in EVERY for size in (1, 2, 4) for flags in ([], DATA)[:size]]


@pytest.mark.parametrize(
    ("name", "size", "rank", "flags", "change"),
    [(*run, shorten) for run in TWO_LAYERS] + [pytest.param(*run, None, marks=pytest.mark.slow) for run in ALL_LAYERS],
)
def test_a_worker(name: str, size: int, rank: int, flags: list[str], change: Any, device: Device) -> None:
    with checkpoint(name, change) as model_flags:
        runner, model, use = start([*model_flags, *flags, "-tp", str(size)], rank)
    kinds = [kind for kind in SAMPLING if kind != "image" or flags is not NO_MEDIA]
    met, held, device.serving = set(device.specialisations), device.used, True
    with grammars() as known:
        runner.grammars = None if rank else known
        serve(f"{name}, {size} ranks", runner, model, kinds, device)
    assert not device.specialisations - met, "kernels first compiled while requests are served"
    assert device.peak - held <= use.step + use.media
