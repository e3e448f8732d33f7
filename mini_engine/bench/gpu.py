"""Regime `gpu`: a model of 7 B on one CUDA device, each part against what the device can do at most.

The regime. Qwen2.5-VL-7B's dimensions, random weights, bfloat16, T = 1. First the device itself: `copy`, the bytes a
second of a large copy, read and written bytes counted; and `matrix`, the operations a second of a product of 8192 x
8192 matrices. Then, by the worker's own `ModelRunner`, each with a step launched ahead as the worker does:
    decode     one token for each of 1, 8, 32 and 64 sequences of 1,024 and 8,192 tokens: the share of `copy` at which
               weights and cache are read. The aim: 70 %.
    penalties  the same at the largest batch and the first context, with repetition_penalty 1.05.
    mixed      the same again, each step with a new prompt of 50 tokens beside it, which keeps it from being replayed.
    prefill    a prompt of 8,192 tokens in one step: the share of `matrix`. The aim: 50 %.
    vision     a video of 16 frames of 640x360 through the tower, from uint8 patches on the device: the share of
               `matrix`. The aim: 40 %.
    grids      videos of about that size, each of a height and width that the tower has not seen before.
    transfer   a tensor on the device, from this process to a worker's receiver in another (`cuda_slots.py`).
What it should cost on an H200 (4.8 TB/s, 990 TFLOP/s by its data sheet): decode at batch 1 reads 14 GB, 3 ms; prefill
is 1.2e14 operations, 0.25 s at half the rate; the video is 1.3e13, 30 ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from mini_engine.bench.parser import at_least
from mini_engine.bench.report import Report, table
from mini_engine.config import AttentionBackendName, ConfigError
from mini_engine.stdout import tell

if TYPE_CHECKING:
    import torch

    from mini_engine.bench import gpu_device

HELP = "decode, prefill, vision and transfer of a 7 B model on a CUDA device"
AIMS = {"decode": 0.7, "prefill": 0.5, "vision": 0.4}
PARTS = ("decode", "penalties", "mixed", "prefill", "vision", "grids", "transfer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="Run these parts only.")
    parser.add_argument(
        "--batches", type=at_least(1), nargs="+", default=[1, 8, 32, 64], help="Sequences (default: 1 8 32 64)."
    )
    parser.add_argument(
        "--contexts", type=at_least(1), nargs="+", default=[1024, 8192], help="Tokens before (default: 1024 8192)."
    )
    parser.add_argument("--steps", type=at_least(1), default=50, help="Decode steps timed at a time (default: 50).")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="Times; medians count (default: 5).")
    parser.add_argument("--enforce-eager", action="store_true", help="Without CUDA graphs.")
    parser.add_argument(
        "--attention-backend", choices=get_args(AttentionBackendName), default="auto",
        help="What computes the decoder's attention; only triton's steps become CUDA graphs (default: auto).",
    )  # fmt: skip
    parser.add_argument("--block-size", type=int, default=16, help="Tokens in a block of the KV cache (default: 16).")


def run(args: argparse.Namespace) -> Report:
    """Measure; each part prints its table when it is done."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("gpu: torch finds no CUDA device here, so there is nothing to measure")
    from mini_engine.bench import gpu_device

    cuda = torch.device("cuda", 0)
    device = gpu_device.Device(cuda)
    report = Report({"device": device.describe()})
    report.failures += tell(
        f"{device.name}: copy {device.copy_rate / 1e12:.2f} TB/s, matrix {device.matrix_rate / 1e12:.0f} TFLOP/s\n"
    )
    rows: list[dict[str, Any]] = []
    if set(args.part) - {"transfer"}:
        rows = measure(args, device, cuda, report)
    if "transfer" in args.part:
        report.figures["transfer"] = gpu_device.transfers(args.repeats)
    report.figures["rows"] = rows
    report.failures += tell(describe(rows, report.figures.get("transfer", [])))
    return report


def measure(
    args: argparse.Namespace, device: gpu_device.Device, cuda: torch.device, report: Report
) -> list[dict[str, Any]]:
    """The rows of all parts that run the model."""
    from mini_engine.bench import gpu_device, gpu_work

    longest = max(args.contexts) + args.steps * (args.repeats + 2)
    model = gpu_device.Model(
        gpu_work.QWEN2_5_VL_7B, cuda, max(args.batches), longest,
        graphs=not args.enforce_eager, attention=args.attention_backend, block_size=args.block_size,
    )  # fmt: skip
    report.figures["attention"] = {"backend": model.attention, "block_size": args.block_size}
    timed, most = (args.steps, args.repeats), (max(args.batches), args.contexts[0])
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "decode": lambda: [device.decode(model, b, c, *timed) for c in args.contexts for b in args.batches],
        "penalties": lambda: [device.penalties(model, *most, *timed)],
        "mixed": lambda: [device.mixed(model, *most, *timed)],
        "prefill": lambda: [device.prefill(model, args.repeats)],
        "vision": lambda: [device.vision(model, args.repeats)],
        "grids": lambda: [device.grids(model, args.repeats)],
    }
    return [row for part, rows in parts.items() if part in args.part for row in rows()]


def describe(rows: list[dict[str, Any]], transfers: list[dict[str, Any]]) -> str:
    """The tables for people."""
    shown = [
        [row["part"], row["batch"], row["context"], row["ms"], row["gigabytes"], row["teraflop"],
         f"{100 * row['share']:.0f} %", f"{100 * AIMS[row['part']]:.0f} %" if row["part"] in AIMS else ""]
        for row in rows
    ]  # fmt: skip
    head = ["part", "batch", "context", "ms", "GB", "TFLOP", "share", "aim"]
    sent = [[f"{row['megabytes']:g} MB", row["ms"], row["gigabytes_per_second"]] for row in transfers]
    return "\n\n".join(
        [table(head, shown) if shown else "", table(["transfer", "ms", "GB/s"], sent) if sent else ""]
    ).strip()
