"""A model on one CUDA device, each part against what the device can do at most. Not yet measured on a device.

The model is that of --launch, by default Qwen2.5-VL-7B with random weights. First the device itself: `copy`, the bytes
a second of a large copy, read and written bytes counted; and `matrix`, the operations a second of a product of 8192 x
8192 matrices. Then, by the worker's own `ModelRunner`:
    decode   one token for each of some sequences: the share of `copy` at which weights and cache are read. Aim: 70 %.
    prefill  a prompt of 8,192 tokens in one step: the share of `matrix`. Aim: 50 %.
    vision   a video of 16 frames of 640x360 through the tower, from uint8 patches: the share of `matrix`. Aim: 40 %.
A part's least work follows from its weights: bytes of them and of the cache, two operations for each and a row.

What it should cost on an H200 (4.8 TB/s, 990 TFLOP/s by its data sheet): decode at batch 1 reads 14 GB, 3 ms; prefill
is 1.2e14 operations, 0.25 s at half the rate; the video is 1.3e13, 30 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from mini_engine.bench.cli import Report, table
from mini_engine.bench.server import server_flags
from mini_engine.bench.step import decode, make_runner, take
from mini_engine.cli import parse
from mini_engine.config import ConfigError
from mini_engine.worker.model_runner import ModelRunner

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct --load-format dummy --dtype bfloat16"
COPY_BYTES = 4 << 30
SIDE = 8192
PREFILL_TOKENS = 8192
VIDEO_GRID = (8, 26, 46)  # of 16 frames of 640x360, which the processor makes 644x364, in patches of 14 pixels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("--launch", default=MODEL, metavar="FLAGS", help=f"Flags of serve.py (default: {MODEL}).")
    add("--batches", type=int, nargs="+", default=[1, 8, 32, 64], help="Batch sizes (default: 1 8 32 64).")
    add("--contexts", type=int, nargs="+", default=[1024, 8192], help="Context lengths (default: 1024 8192).")
    add("--steps", type=int, default=50, help="Decode steps per measurement (default: 50).")
    add("--repeats", type=int, default=5, help="Measurements; medians count (default: 5).")


def run(args: argparse.Namespace) -> Report:
    """Measure all parts and print the table."""
    if not torch.cuda.is_available():
        raise ConfigError("gpu: torch finds no CUDA device here")
    copy_rate, matrix_rate = _rates()
    longest = max(*args.contexts, PREFILL_TOKENS) + args.steps * (args.repeats + 1)
    runner, model = make_runner(parse(server_flags("--launch", args.launch)), max(args.batches), longest)
    text, vision, cache = model.config.text, model.config.vision, model.attention_shape
    weights = _weights(model.decoder) + _weights(model.head)
    token_bytes = 2 * cache.layers * cache.kv_heads * cache.head_dim * runner.dtype.itemsize
    rows: list[list[object]] = []
    for context, batch in itertools.product(args.contexts, args.batches):
        with contextlib.closing(decode(runner, batch, context, cached=context - 1)) as steps:
            seconds = _median(partial(take, steps, args.steps), args.repeats) / args.steps
        mean_context = context + args.steps * (args.repeats + 2) // 2
        moved = weights * runner.dtype.itemsize + batch * mean_context * token_bytes
        rows.append(["decode", batch, context, 1000 * seconds, moved / seconds / copy_rate, 0.7])
    seconds = _median(partial(_prefill, runner), args.repeats)
    # Of attention, the half that is causal.
    attention = 2 * text.num_layers * text.num_heads * text.head_dim * PREFILL_TOKENS**2
    share = (2 * PREFILL_TOKENS * weights + attention) / seconds / matrix_rate
    rows.append(["prefill", 1, PREFILL_TOKENS, 1000 * seconds, share, 0.5])
    t, h, w = VIDEO_GRID
    patches = torch.zeros(t * h * w, vision.patch_dim, dtype=torch.uint8, device=runner.device)
    seconds = _median(lambda: runner.encode_patches([patches], [VIDEO_GRID]), args.repeats)
    flops = 2 * t * h * w * _weights(model.visual)
    rows.append(["vision", 1, None, 1000 * seconds, flops / seconds / matrix_rate, 0.4])
    head = ["part", "batch", "context", "ms", "share", "aim"]
    name = torch.cuda.get_device_name(runner.device)
    print(f"{name}: copy {copy_rate / 1e12:.2f} TB/s, matrix {matrix_rate / 1e12:.0f} TFLOP/s")
    print(table(head, rows))
    results = {"device": name, "copy_bytes_per_s": copy_rate, "matrix_flop_per_s": matrix_rate}
    return Report(results | {"rows": [dict(zip(head, row, strict=True)) for row in rows]})


def _weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _prefill(runner: ModelRunner) -> None:
    with contextlib.closing(decode(runner, 1, PREFILL_TOKENS, cached=0)) as steps:
        take(steps, 1)


def _rates() -> tuple[float, float]:
    """Bytes a second of a copy, operations a second of a matrix product."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    left, right = torch.randn(2, SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    copied = _median(lambda: target.copy_(source), 10)
    return 2 * COPY_BYTES / copied, 2 * SIDE**3 / _median(lambda: torch.mm(left, right), 10)


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
