"""What paged attention must compute: a plain softmax in float64, one query at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_engine.worker.attention.sdpa import Span


def slots_of(spans: list[Span], block_size: int) -> Tensor:
    """Where the tokens of the spans are kept, one span after the other."""
    index = [np.arange(span.start, span.context) for span in spans]
    places = [span.blocks[i // block_size] * block_size + i % block_size for span, i in zip(spans, index, strict=True)]
    return torch.from_numpy(np.concatenate(places))


def reference_attention(q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> Tensor:
    """Attention of a flat batch over blocks that already hold the batch's own keys and values.

    Args:
        q: `[n, heads, head_dim]`, the spans one after the other.
        keys, values: `[num_blocks, block_size, kv_heads, head_dim]`.

    Returns:
        float64 `[n, heads, head_dim]`.
    """
    group = q.shape[1] // keys.shape[2]
    outputs: list[Tensor] = []
    for span in spans:
        blocks = torch.as_tensor(span.blocks)
        k, v = (x[blocks].flatten(0, 1).double().repeat_interleave(group, dim=1) for x in (keys, values))
        for seen in range(span.start + 1, span.context + 1):
            scores = torch.einsum("hd,khd->hk", q[len(outputs)].double(), k[:seen]) * q.shape[-1] ** -0.5
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[:seen]))
    return torch.stack(outputs)
