"""A model on one CUDA device, each part against what the device can do at most. Needs no network.

First the device itself: `copy`, the bytes a second of a large copy, read and written bytes counted; and `matrix`, the
operations a second of a product of 8192 x 8192 matrices. Then, for each of --models, by the worker's own `ModelRunner`:
    decode   one token for each of some sequences: the share of `copy` at which weights and cache are read. Aim: 70 %.
    prefill  a prompt of 8,192 tokens in one step: the share of `matrix`. Aim: 50 %.
    vision   a video of 16 frames of 640x360 through the tower, from uint8 patches: the share of `matrix`. Aim: 40 %.
A part's least work is counted as by `bench.py roofline`. A batch that does not fit into the free memory is cut. With
--check the command finds out instead whether all that the engine needs of a device works (`benchmarks/gpu_check.py`).

What it should cost on an H200 (4.8 TB/s, 990 TFLOP/s by its data sheet): decode of Qwen2.5-VL-7B at batch 1 reads
14 GB, 3 ms; prefill is 1.2e14 operations, 0.25 s at half the rate; the video is 1.3e13, 30 ms.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import gpu_check
from benchmarks.cli import Report, table
from benchmarks.roofline import Rates, parts
from benchmarks.runner import CONFIGS, checkpoint, make_runner, num_weights
from benchmarks.server import server_flags
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.launch.cli import parse
from mini_engine.launch.plan.startup_checks import resolve_model
from mini_engine.model.config import ModelConfig
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel

BY_SIZE = ("Qwen2.5-VL-7B-Instruct", "Qwen3-VL-4B-Instruct", "Qwen2-VL-2B-Instruct")
COPY_BYTES = 4 << 30
SIDE = 8192
PREFILL_TOKENS = 8192
VIDEO_GRID = (8, 26, 46)  # of 16 frames of 640x360, which the processor makes 644x364, in patches of 14 pixels
WORK_BYTES = 5 << 29  # beside weights and cache: a prefill's activations, CUDA graphs, workspaces
HEAD = ("model", "part", "batch", "context", "ms", "share", "aim")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add, known = parser.add_argument, ", ".join(path.stem for path in sorted(CONFIGS.glob("*.json")))
    add("--check", action="store_true", help="PASS or FAIL for each thing that the engine needs, without other flags.")
    text = f"Of {known}, with random weights, or as serve.py takes it (default: the first that fits of {BY_SIZE})."
    add("--models", nargs="+", default=[], metavar="MODEL", help=text)
    add("--launch", default="--dtype bfloat16", metavar="FLAGS", help="Flags of serve.py (default: --dtype bfloat16).")
    add("--batches", type=int, nargs="+", default=[1, 8, 32, 64], help="Batch sizes (default: 1 8 32 64).")
    add("--contexts", type=int, nargs="+", default=[1024, 8192], help="Context lengths (default: 1024 8192).")
    add("--steps", type=int, default=50, help="Decode steps per measurement (default: 50).")
    add("--repeats", type=int, default=5, help="Measurements; medians count (default: 5).")


def run(args: argparse.Namespace) -> Report:
    """Measure all parts and print the table."""
    if args.check:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        for name, value in vars(parser.parse_args(["--check"])).items():
            if getattr(args, name) != value:
                raise ConfigError(f"--{name}: --check takes no other flags; leave it out")
        return gpu_check.run({**gpu_check.CHECKS, "shares": shares})
    if not torch.cuda.is_available():
        raise ConfigError("gpu: torch finds no CUDA device here")
    device, flags, rates = torch.cuda.get_device_name(), server_flags("--launch", args.launch), measure_rates()
    print(f"{device}: {describe(rates)}", flush=True)
    rows: list[list[object]] = []
    for name in args.models or [default_model(flags)]:
        with checkpoint(name) as model:
            found = measure(parse([*model, *flags]), rates, args.batches, args.contexts, args.steps, args.repeats)
            rows += [[name, *row] for row in found]
    print(table(HEAD, rows))
    results = {"device": device, "copy_bytes_per_s": rates.streaming, "matrix_flop_per_s": rates.products}
    return Report(results | {"rows": [dict(zip(HEAD, row, strict=True)) for row in rows]})


def shares() -> str:
    """Decode, prefill and tower reach half the aims: below that something is broken rather than slow."""
    rates, name = measure_rates(), default_model([])
    with checkpoint(name) as flags:
        rows = list(measure(parse(flags), rates, [1, 32], [1024], steps=20, repeats=3))
    texts = [f"{part} at batch {batch} {share:.0%}" for part, batch, _, _, share, _ in rows]
    low = [text for text, (*_, share, aim) in zip(texts, rows, strict=True) if share < aim / 2]
    text = f"of {describe(rates)}: {name}, {', '.join(texts)}"
    assert not low, f"too low: {', '.join(low)}; {text}"
    return text


def describe(rates: Rates) -> str:
    """Both, in words."""
    return f"copy {rates.streaming / 1e12:.2f} TB/s, matrix {rates.products / 1e12:.0f} TFLOP/s"


def measure_rates() -> Rates:
    """Of the current device: those of a bfloat16 product, and of a copy, which are bytes read and written."""
    nbytes = min(COPY_BYTES, free_memory() // 4)
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    copied = _median(source.clone, 10)
    left, right = torch.randn(2, SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    return Rates(2 * SIDE**3 / _median(partial(torch.mm, left, right), 10), 2 * nbytes / copied)


def free_memory() -> int:
    """Bytes of the current device, what has no reference any more among them."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class Footprint(NamedTuple):
    """Bytes of a model on one device."""

    weights: int
    token: int  # of the KV cache
    state: int  # the recurrent state of a sequence


def footprint(config: EngineConfig) -> Footprint:
    """From its configuration: nothing is loaded."""
    sizes = ModelConfig.from_dir(resolve_model(config))
    dtype: torch.dtype = getattr(torch, sizes.dtype if config.dtype == "auto" else config.dtype)
    model = VisionLanguageModel(sizes, Placement(TensorParallel(), dtype, torch.device("meta")))
    cache, state = model.attention_shape, model.state_shape
    token = 2 * cache.layers * cache.kv_heads * cache.head_dim * dtype.itemsize
    return Footprint(
        num_weights(model) * dtype.itemsize, token, state.nbytes(dtype.itemsize) if state is not None else 0
    )


def default_model(flags: Sequence[str]) -> str:
    """The first of BY_SIZE that fits into the free memory of the current device, or the last."""
    for name in BY_SIZE:
        with checkpoint(name) as model:
            weights = footprint(parse([*model, *flags])).weights
        if weights + 2 * WORK_BYTES <= free_memory():
            break
    return name


def cut(batches: Sequence[tuple[int, int]], room: int, token: int, more: int) -> list[tuple[int, int]]:
    """(sequences, tokens of each), cut to as many sequences as fit into `room` bytes, of `token` each, while each grows
    by `more` tokens. Each once; those of which not one fits are left out."""
    fitting = [(min(batch, room // ((context + more) * token)), context) for batch, context in batches]
    return [pair for pair in dict.fromkeys(fitting) if pair[0] > 0]


def measure(
    config: EngineConfig, rates: Rates, batches: Sequence[int], contexts: Sequence[int], steps: int, repeats: int
) -> Iterator[tuple[str, int, int | None, float, float, float]]:
    """Each part's name, batch, context, milliseconds, share and aim. Raises ConfigError: there is no room."""
    need, free, grown = footprint(config), free_memory(), steps * (repeats + 1) + config.block_size
    room = free - need.weights - max(batches) * need.state - WORK_BYTES  # states are allocated once, for all batches
    decodes = cut([(batch, context) for context in contexts for batch in batches], room, need.token, grown)
    if not cut([(1, PREFILL_TOKENS)], room, need.token, grown):
        raise ConfigError(f"the weights, {need.weights / 2**30:.1f} GiB, leave no room in {free / 2**30:.1f} GiB")
    sizes = [(batch, context + grown) for batch, context in ((1, PREFILL_TOKENS), *decodes)]
    runner, model = make_runner(config, sizes)
    rows: list[tuple[str, int, int | None, float]] = [("decode", *each, 0.7) for each in decodes]
    rows += [("prefill", 1, PREFILL_TOKENS, 0.5), ("vision", 1, None, 0.4)]
    measured = parts(runner, model, decodes, [PREFILL_TOKENS], VIDEO_GRID, steps, repeats)
    for (name, batch, context, aim), part in zip(rows, measured, strict=True):
        seconds = _median(part.run, repeats) / part.times
        yield name, batch, context, 1000 * seconds, rates.seconds(part.work) / seconds, aim


def _median(work: Callable[[], object], repeats: int) -> float:
    """Seconds until the device has done it; the first time does not count."""
    samples = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - begun)
    return statistics.median(samples[1:])
