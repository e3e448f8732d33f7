"""The decoder over a flat batch: all sequences of a step lie one after the other.

What belongs to which sequence, and where earlier keys and values are kept, is known to the `attend` hook alone.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mini_engine.kernels import ops
from mini_engine.model.config import TextConfig
from mini_engine.model.layers import ColumnParallel, GatedMLP, RMSNorm, RowParallel, Rows
from mini_engine.model.parallel import Placement
from mini_engine.model.rope import MRope, Rotation


class Attend(Protocol):
    """The attention of one step. Scores are scaled by `head_dim ** -0.5`; key-value head i serves the i-th equal run of
    query heads."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[n, heads_local, head_dim]`, k and v `[n, kv_heads_local, head_dim]`, q and k already rotated -> a tensor
        shaped like q. The arguments may be views of one buffer: copy what is to be kept. v is not contiguous."""
        ...


class MediaRows(NamedTuple):
    """A piece of a media item in a flat batch: its rows from the vision tower, and the batch's row of the first.

    The first `hidden_size` columns are the decoder's input; each further `hidden_size` of them are added to the output
    of one layer, from the first layer on (DeepStack, Meng et al. 2024).
    """

    first: int
    rows: Tensor


class Attention(nn.Module):
    """Grouped-query attention, query heads split over the ranks, key-value heads split or replicated."""

    def __init__(self, source: str, layer: int, config: TextConfig, at: Placement) -> None:
        super().__init__()
        dim = config.head_dim
        heads, kv_heads = at.tp.part(config.num_heads), at.tp.kv_heads(config.num_kv_heads)
        self.layer, self.head_dim = layer, dim
        self.heads, self.kv_heads = heads.stop - heads.start, kv_heads.stop - kv_heads.start
        part = slice(heads.start * dim, heads.stop * dim)
        kv_part = slice(kv_heads.start * dim, kv_heads.stop * dim)
        rows = [
            Rows(f"{source}.q_proj", config.num_heads * dim, part),
            Rows(f"{source}.k_proj", config.num_kv_heads * dim, kv_part),
            Rows(f"{source}.v_proj", config.num_kv_heads * dim, kv_part),
        ]
        self.qkv = ColumnParallel(config.hidden_size, rows, bias=config.qkv_bias, at=at)
        self.q_norm = RMSNorm(f"{source}.q_norm", dim, config.rms_norm_eps, at) if config.qk_norm else None
        self.k_norm = RMSNorm(f"{source}.k_norm", dim, config.rms_norm_eps, at) if config.qk_norm else None
        self.o = RowParallel(f"{source}.o_proj", config.num_heads * dim, part, config.hidden_size, bias=False, at=at)

    def forward(self, x: Tensor, turn: Rotation, attend: Attend) -> Tensor:
        rotated = self.heads + self.kv_heads
        qkv = self.qkv(x).unflatten(-1, (rotated + self.kv_heads, self.head_dim))
        qk, v = qkv.split((rotated, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = ops.rotate(qk, *turn).split((self.heads, self.kv_heads), dim=1)
        return self.o(attend(self.layer, q, k, v).flatten(1))


class DecoderLayer(nn.Module):
    """One layer. Sums are left to the norm that reads them next, which on a device makes them in passing."""

    def __init__(self, source: str, layer: int, config: TextConfig, at: Placement) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm1 = RMSNorm(f"{source}.input_layernorm", size, eps, at)
        self.attention = Attention(f"{source}.self_attn", layer, config, at)
        self.norm2 = RMSNorm(f"{source}.post_attention_layernorm", size, eps, at)
        self.mlp = GatedMLP(f"{source}.mlp", size, config.intermediate_size, bias=False, at=at)

    def forward(self, x: Tensor, residual: Tensor | None, turn: Rotation, attend: Attend) -> tuple[Tensor, Tensor]:
        """The layer's input is the sum of x and residual, its output that of the two results; x becomes the input."""
        # What a row-parallel layer returns is fresh memory, so the sums need none of their own.
        attended = self.attention(self.norm1.after_add(x, residual), turn, attend)
        return self.mlp(self.norm2.after_add(attended, x)), attended


class Decoder(nn.Module):
    """All layers and the final norm; embeddings and head are the model's.

    Raises ValueError at construction if the heads do not divide by the ranks.
    """

    def __init__(self, config: TextConfig, at: Placement) -> None:
        super().__init__()
        at.tp.check_heads("attention", config.num_heads, config.num_kv_heads)
        self.rope = MRope(config, at.device)
        self.layers = nn.ModuleList(
            DecoderLayer(f"model.language_model.layers.{i}", i, config, at) for i in range(config.num_layers)
        )
        self.norm = RMSNorm("model.language_model.norm", config.hidden_size, config.rms_norm_eps, at)

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend, media: Sequence[MediaRows] = ()) -> Tensor:
        """`[n, hidden_size]` and int64 `[3, n]` -> `[n, hidden_size]`, after the final norm, the same on every rank.

        `hidden` holds the first columns of `media` already.
        """
        turn, size = self.rope.tables(positions), hidden.shape[1]
        residual: Tensor | None = None
        for i, layer in enumerate(self.layers, 1):
            hidden, residual = layer(hidden, residual, turn, attend)
            for first, rows in media:
                if rows.shape[1] > i * size:
                    hidden[first : first + len(rows)] += rows[:, i * size : (i + 1) * size]
        return self.norm.after_add(hidden, residual)
