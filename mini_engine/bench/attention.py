"""Regime `attention`: three forms of a decode step's attention over the paged cache, on the CPU.

The regime. One layer, 16 query heads over 2 key-value heads of 128, one token each of sequences of 200 to 2,000 tokens,
blocks of 16 in random order, one thread. The forms differ in how keys and values come before torch's
`scaled_dot_product_attention`:
    gathered   what the engine does (`worker/paged_attention.py`): the blocks of a sequence, or of a few that need
               little padding; the query heads that share a key-value head are the rows of one product.
    enable_gqa each sequence's blocks, and the query heads as torch's own option takes them.
    padded     all sequences in one call, the shorter ones padded to the longest and masked; rows as in `gathered`.
All give the same result, which is checked. Times are those of the thread on a CPU, which a busy machine stretches less.
What it should cost: keys and values are read once, 2 KiB a token in float32 for 2 heads of 128, so 8 sequences of 1,100
tokens on average are 18 MB: 2 ms at 10 GB/s, gathering included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mini_engine.bench.parser import at_least
from mini_engine.bench.report import BenchError, Report, table
from mini_engine.stdout import tell

if TYPE_CHECKING:
    import torch

HELP = "a decode step's attention on the CPU, in three forms"
HEADS, KV_HEADS, DIM, BLOCK_SIZE = 16, 2, 128, 16
SHORTEST, LONGEST = 200, 2000
DTYPES = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--sequences", type=at_least(1), default=8, help="Sequences in the step (default: 8).")
    parser.add_argument("--repeats", type=at_least(1), default=50, help="Times; medians count (default: 50).")


def run(args: argparse.Namespace) -> Report:
    """Measure both number formats."""
    rows = [row for dtype in DTYPES for row in measure(dtype, args.sequences, args.repeats)]
    head = (
        f"attention of one layer, {args.sequences} sequences of {SHORTEST} to {LONGEST} tokens, "
        f"{HEADS}/{KV_HEADS} heads of {DIM}, one thread; medians of {args.repeats}\n"
    )
    columns = ("dtype", "form", "ms", "over_gathered")
    found = table(columns, [[row[name] for name in columns] for row in rows])
    return Report({"rows": rows}, tell(f"{head}\n{found}"))


def measure(dtype: str, sequences: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each form; they take turns, so that drift of the machine hits all alike."""
    import torch

    torch.set_num_threads(1)
    forms = make_forms(getattr(torch, dtype), sequences)
    first = forms["gathered"]()
    bound = 1e-5 if dtype == "float32" else 2e-2
    for name, form in forms.items():
        if not torch.allclose(form().float(), first.float(), atol=bound):
            raise BenchError(f"the form {name} gives another result in {dtype}")
    samples: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, form in forms.items():
            begun = time.thread_time()
            form()
            samples[name].append(time.thread_time() - begun)
    medians = {name: 1000 * statistics.median(values) for name, values in samples.items()}
    return [
        {"dtype": dtype, "form": name, "ms": round(ms, 3), "over_gathered": round(ms / medians["gathered"], 2)}
        for name, ms in medians.items()
    ]


def make_forms(dtype: torch.dtype, sequences: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Each form by name: from the cache to `[sequences, HEADS, DIM]`."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from mini_engine.model.vision_language import AttentionShape
    from mini_engine.worker.kv_cache import KVCache
    from mini_engine.worker.paged_attention import SdpaBackend, Span, attention_order

    generator = np.random.default_rng(0)
    lengths = np.linspace(SHORTEST, LONGEST, sequences).astype(int)
    used = -(-lengths // BLOCK_SIZE)
    tables = np.split(generator.permutation(int(used.sum())), np.cumsum(used)[:-1])
    spans = sorted((Span(n - 1, 1, t) for n, t in zip(lengths.tolist(), tables, strict=True)), key=attention_order)
    cpu = torch.device("cpu")
    cache = KVCache.allocate(AttentionShape(1, KV_HEADS, DIM), int(used.sum()), BLOCK_SIZE, dtype, cpu)
    cache.storage.normal_()
    q, k, v = torch.randn(sequences, HEADS + 2 * KV_HEADS, DIM, dtype=dtype).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    slots = torch.tensor([int(s.blocks[s.start // BLOCK_SIZE]) * BLOCK_SIZE + s.start % BLOCK_SIZE for s in spans])
    attend = SdpaBackend(cache).step(slots, spans)
    blocks = [torch.from_numpy(span.blocks) for span in spans]
    width = max(map(len, blocks))
    wide = torch.stack([F.pad(one, (0, width - len(one)), value=int(one[-1])) for one in blocks]).flatten()
    seen = torch.arange(width * BLOCK_SIZE) < torch.tensor([span.context for span in spans]).unsqueeze(1)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))[:, None, None]

    def gathered() -> torch.Tensor:
        return attend(0, q, k, v)

    def enable_gqa() -> torch.Tensor:
        cache.write(0, slots, k, v)
        outputs = []
        for i, (span, own) in enumerate(zip(spans, blocks, strict=True)):
            keys, values = (
                x.index_select(0, own).flatten(0, 1)[: span.context].transpose(0, 1)[None]
                for x in (cache.keys(0), cache.values(0))
            )
            outputs.append(F.scaled_dot_product_attention(q[i, None, :, None], keys, values, enable_gqa=True))
        return torch.cat(outputs).squeeze(2)

    def padded() -> torch.Tensor:
        cache.write(0, slots, k, v)
        keys, values = (
            x.index_select(0, wide).view(sequences, -1, KV_HEADS, DIM).transpose(1, 2)
            for x in (cache.keys(0), cache.values(0))
        )
        rows = q.unflatten(1, (KV_HEADS, -1))
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask).flatten(1, 2)

    return {"gathered": gathered, "enable_gqa": enable_gqa, "padded": padded}
