"""A model on this CPU, each part against what the machine can do at most. Needs no network and no server.

First the machine: `products`, the operations a second of a product of 2,048 rows with a matrix of 2048 x 8192 in the
model's dtype; and `streaming`, the bytes a second at which products of one row read 512 MiB of such matrices, kept as
the engine keeps its own. Both are measured again before each part, since other guests of a host take their share. Then
the worker's own `ModelRunner`:
    decode   a token for each of some sequences of 512
    prefill  a prompt in one step
    tower    one temporal grid of a 640x480 video, two frames, from uint8 patches
The least work of a part are its operations, of products and of attention (in a prompt the half that is causal), and the
bytes of weights, as they are held, and of KV cache that it reads, of experts those that its tokens choose; its limit is
the time of the one or of the other, whichever is longer. With `OMP_NUM_THREADS` as many threads, otherwise one for each
core.

The aims are 0.8 of the limit in decode and prefill, 0.75 in the tower: the softmax counts as nothing.
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.cli import Report, table
from benchmarks.products import packed
from benchmarks.runner import (
    CONFIGS,
    checkpoint,
    decode,
    make_runner,
    num_weights,
    plain_requests,
    read_bytes,
    take,
    token_weights,
    weights_by_name,
)
from benchmarks.server import server_flags
from mini_engine.config import BUNDLED_MODEL, ConfigError
from mini_engine.launch.cli import parse
from mini_engine.launch.process_setup import keep_freed_memory
from mini_engine.matmul.linear import linear
from mini_engine.model.rope import Grid
from mini_engine.model.towers.vision import layout
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.model_runner import ModelRunner

CONTEXT = 512  # tokens of a decoding sequence
HEIGHT, WIDTH = 480, 640
ROWS, INPUTS, OUTPUTS = 2048, 2048, 8192  # of the product
STREAMED_BYTES = 512 << 20
HEAD = ("part", "size", "ms", "limit ms", "share", "products TFLOP/s", "streaming GB/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add, known = parser.add_argument, ", ".join(path.stem for path in sorted(CONFIGS.glob("*.json")))
    text = f"Of {known}, with random weights, or as serve.py takes it (default: the bundled one)."
    add("--model", default=BUNDLED_MODEL, help=text)
    add("--launch", default="", metavar="FLAGS", help="Flags of serve.py, such as --dtype bfloat16.")
    add("--batches", type=int, nargs="+", default=[1, 8, 32], help="Sequences that decode (default: 1 8 32).")
    add("--prompts", type=int, nargs="+", default=[512, 2048], help="Lengths of prompts (default: 512 2048).")
    add("--steps", type=int, default=5, help="Decode steps per measurement (default: 5).")
    add("--repeats", type=int, default=3, help="Measurements; medians count (default: 3).")


class Rates(NamedTuple):
    """What the machine can do at most."""

    products: float  # operations a second
    streaming: float  # bytes a second

    def seconds(self, work: "Work") -> float:
        """The least time for this work."""
        return max(work.operations / self.products, work.bytes / self.streaming)


class Work(NamedTuple):
    """What a part cannot do without."""

    operations: int
    bytes: int


class Part(NamedTuple):
    """`run` does the work `times` times; `size` is the number of sequences, tokens or patches."""

    name: str
    size: int
    run: Callable[[], object]
    work: Work
    times: int = 1


def run(args: argparse.Namespace) -> Report:
    """Measure all parts, print the table."""
    threads = torch.get_num_threads()
    keep_freed_memory()  # as a worker does
    torch.set_flush_denormal(True)
    rows: list[list[object]] = []
    with checkpoint(args.model) as model_flags:
        config = parse([*model_flags, *server_flags("--launch", args.launch)])
        grown = CONTEXT + args.steps * (args.repeats + 2)
        sizes = [(batch, grown) for batch in args.batches] + [(1, length) for length in args.prompts]
        runner, model = make_runner(config, sizes, threads)
    if runner.device.type != "cpu":
        raise ConfigError("roofline: it measures a CPU; set --device cpu, or use `bench.py gpu`")
    vision, decodes = model.config.vision, [(batch, CONTEXT) for batch in args.batches]
    side = vision.patch_size * vision.spatial_merge_size
    height, width = (round(pixels / side) * vision.spatial_merge_size for pixels in (HEIGHT, WIDTH))
    for part in parts(runner, model, decodes, args.prompts, (1, height, width), args.steps, args.repeats):
        rates, seconds = measure(part, runner.dtype, args.repeats)
        limit = rates.seconds(part.work)
        numbers = (1000 * seconds, 1000 * limit, limit / seconds, rates.products / 1e12, rates.streaming / 1e9)
        rows.append([part.name, part.size, *numbers])
    print(f"{args.model}, {runner.dtype}, {threads} thread(s); medians of {args.repeats}")
    print(table(HEAD, rows))
    return Report({"threads": threads, "rows": [dict(zip(HEAD, row, strict=True)) for row in rows]})


def measure(part: Part, dtype: torch.dtype, repeats: int) -> tuple[Rates, float]:
    """The machine's rates and the seconds of a part, measured in turn; the first time does not count."""
    x, weight = torch.randn(ROWS, INPUTS).to(dtype), torch.randn(OUTPUTS, INPUTS).to(dtype)
    count = STREAMED_BYTES // (weight.numel() * weight.element_size())
    streamed = [packed(weight.clone()) for _ in range(count)]
    samples: list[tuple[float, float, float]] = []
    for _ in range(repeats + 1):
        product = _seconds(lambda: linear(x, streamed[0]))
        stream = _seconds(lambda: [linear(x[:1], matrix) for matrix in streamed])
        samples.append((product, stream, _seconds(part.run) / part.times))
    product, stream, seconds = map(statistics.median, zip(*samples[1:], strict=True))
    return Rates(2 * ROWS * weight.numel() / product, STREAMED_BYTES / stream), seconds


def parts(
    runner: ModelRunner,
    model: VisionLanguageModel,
    decodes: Sequence[tuple[int, int]],
    prompts: Sequence[int],
    grid: Grid,
    steps: int,
    repeats: int,
) -> Iterator[Part]:
    """Decodes of so many sequences and tokens, prompts of so many tokens, and the tower, one after the other: each has
    the whole cache. A decode is run `repeats` + 1 times; of each but the first the mean length counts."""
    head, element = num_weights(model.head), runner.dtype.itemsize
    decoder = token_weights(model) - head
    shape, state, text = model.attention_shape, model.state_shape, model.config.text
    states = 2 * state.nbytes(element) if state is not None else 0  # read and written
    pair = 4 * shape.layers * text.num_heads * shape.head_dim  # operations of a query and a key
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * element  # bytes of a token
    for batch, context in decodes:
        length = context + steps * (repeats + 2) // 2
        with contextlib.closing(decode(runner, plain_requests(batch, context), context - 1)) as launches:
            operations = batch * (2 * (decoder + head) + pair * length)
            work = Work(operations, read_bytes(model, batch, element) + batch * (length * cached + states))
            yield Part("decode", batch, partial(take, launches, steps), work, steps)
    for length in prompts:
        work = Work(2 * (decoder * length + head) + pair * length**2 // 2, read_bytes(model, length, element))
        yield Part("prefill", length, partial(_prefill, runner, length), work)
    patches = torch.zeros(math.prod(grid), model.config.vision.patch_dim, dtype=torch.uint8, device=runner.device)
    encode = partial(runner.encode_patches, [patches], [grid])
    yield Part("tower", len(patches), encode, tower_work(model, grid, element))


def tower_work(model: VisionLanguageModel, grid: Grid, element: int) -> Work:
    """Of one item; mergers see a row for each merge unit, learned positions are looked up."""
    cfg, patches = model.config.vision, grid[0] * grid[1] * grid[2]
    where = layout((grid,), cfg.spatial_merge_size, cfg.merged_window, torch.device("cpu"))
    merged, per_patch = 0, 0
    for name, count in weights_by_name(model.visual):
        merged += count if "merger" in name or "deepstack" in name else 0
        per_patch += count if "blocks" in name or "patch_embed" in name else 0
    pairs = 0
    for layer in range(cfg.depth):
        whole = cfg.window_size is None or layer in cfg.full_attention_layers
        pairs += sum(count * length**2 for count, length in (where.frames if whole else where.windows).groups)
    operations = 2 * patches * (per_patch + merged // cfg.merge_unit) + 4 * pairs * cfg.hidden_size
    return Work(operations, element * (per_patch + merged))


def _prefill(runner: ModelRunner, length: int) -> None:
    with contextlib.closing(decode(runner, plain_requests(1, length))) as steps:
        take(steps, 1)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
