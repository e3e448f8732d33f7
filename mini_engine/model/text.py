"""The decoder over a flat batch: all sequences of a step lie one after the other.

What belongs to which sequence, and where earlier keys and values and states are kept, is known to the `attend` hook
alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mini_engine.kernels import ops
from mini_engine.model.config import LinearConfig, TextConfig
from mini_engine.model.delta_rule import Weights
from mini_engine.model.experts import MixtureOfExperts
from mini_engine.model.layers import ColumnParallel, GatedMLP, Layer, RMSNorm, RowParallel, Rows, WeightSlice
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.rope import MRope, Rotation


class Attend(Protocol):
    """The attention and the recurrence of one step; the layers of each kind are counted from 0. Scores are scaled by
    `head_dim ** -0.5`; key-value head i serves the i-th equal run of query heads."""

    def __call__(self, layer: int, heads: ops.Heads) -> Tensor:
        """This rank's heads, neither normalised nor rotated, see `ops.rotate_heads` -> `[n, heads_local, head_dim]`.
        They are a view of a buffer that may be changed: copy what is to be kept."""

    def recur(self, layer: int, x: Tensor, gates: Tensor, weights: Weights) -> Tensor:
        """The gated delta rule over all rows of the batch, each sequence's after its own state, which is replaced:
        views x `[n, channels]` and gates `[n, 2 * v_heads_local]` -> `[n, v_heads_local, v_dim]`, all of one dtype. See
        `delta_rule.prefill`."""


class MediaRows(NamedTuple):
    """A piece of a media item in a flat batch: its rows from the vision tower, and the batch's row of the first.

    The first `hidden_size` columns are the decoder's input; each further `hidden_size` of them are added to the output
    of one layer, from the first layer on (DeepStack, Meng et al. 2024).
    """

    first: int
    rows: Tensor


class Attention(nn.Module):
    """Grouped-query attention, query heads split over the ranks, key-value heads split or replicated. With a gate, the
    rows of each head's gate follow those of its query in the checkpoint; here they are behind the values."""

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
        self.split = [self.heads + 2 * self.kv_heads]
        if config.spec.attention_gate:
            places = [slice(i * dim, (i + 1) * dim) for i in range(2 * heads.start, 2 * heads.stop)]
            both = [Rows(f"{source}.q_proj", 2 * config.num_heads * dim, place) for place in places]
            rows = [*both[::2], *rows[1:], *both[1::2]]
            self.split.append(self.heads)
        self.qkv = ColumnParallel(config.hidden_size, rows, bias=config.spec.qkv_bias, at=at)
        eps, offset = config.rms_norm_eps, config.spec.norm_offset
        self.norms: ops.HeadNorms | None = None
        if config.spec.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(f"{source}.{name}_norm", dim, eps, at, offset) for name in "qk")
            self.norms = ops.HeadNorms(self.q_norm.weight, self.k_norm.weight, eps, offset)
        self.o = RowParallel(f"{source}.o_proj", config.num_heads * dim, part, config.hidden_size, bias=False, at=at)

    def forward(self, x: Tensor, turn: Rotation, attend: Attend) -> Tensor:
        qkv, *gate = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.split, dim=1)
        attended = attend(self.layer, ops.Heads(qkv, self.kv_heads, *turn, self.norms)).flatten(1)
        return self.o(ops.mul_sigmoid(attended, gate[0].flatten(1)) if gate else attended)


class GatedDeltaNet(Layer):
    """Linear attention with a state (Yang et al. 2024), key heads and their value heads split over the ranks."""

    def __init__(self, source: str, layer: int, config: TextConfig, linear: LinearConfig, at: Placement) -> None:
        super().__init__()
        self.source, self.layer, self.linear = source, layer, linear
        keys, values = linear.k_heads * linear.k_dim, linear.v_heads * linear.v_dim
        k_part, v_part, self.heads = (at.tp.part(total) for total in (keys, values, linear.v_heads))
        # The checkpoint's one matrix holds q, k and v below each other, as the convolution's kernel does.
        places = ((0, k_part), (keys, k_part), (2 * keys, v_part))
        self.parts = [slice(start + part.start, start + part.stop) for start, part in places]
        rows = [Rows(f"{source}.in_proj_qkv", linear.channels, part) for part in self.parts]
        rows.append(Rows(f"{source}.in_proj_z", values, v_part))
        rows += [Rows(f"{source}.in_proj_{name}", linear.v_heads, self.heads) for name in "ba"]
        self.project = ColumnParallel(config.hidden_size, rows, bias=False, at=at)
        heads = rows[-1].count
        self.sizes = [sum(row.count for row in rows[:3]), rows[3].count, 2 * heads]
        self.kernel = at.empty(self.sizes[0], linear.kernel_size)
        # The decay depends on them exponentially: few numbers, which checkpoints store in float32.
        wide = replace(at, dtype=torch.float32)
        self.A_log, self.dt_bias = wide.empty(heads), wide.empty(heads)
        self.norm = RMSNorm(f"{source}.norm", linear.v_dim, config.rms_norm_eps, at)
        self.out = RowParallel(f"{source}.out_proj", values, v_part, config.hidden_size, bias=False, at=at)

    def forward(self, x: Tensor, _: Rotation, attend: Attend) -> Tensor:
        qkv, z, gates = self.project(x).split(self.sizes, dim=1)
        read = attend.recur(self.layer, qkv, gates, Weights(self.kernel, self.A_log, self.dt_bias))
        return self.out(ops.gated_rms_norm(read.flatten(1), z, self.norm.weight, self.norm.eps))

    def weight_slices(self) -> Iterator[WeightSlice]:
        start = 0
        for part in self.parts:
            here = self.kernel[start : start + part.stop - part.start].unsqueeze(1)
            yield WeightSlice(f"{self.source}.conv1d.weight", (self.linear.channels, *here.shape[1:]), (part,), here)
            start += len(here)
        for name, target in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            yield WeightSlice(f"{self.source}.{name}", (self.linear.v_heads,), (self.heads,), target)


def state_shape(linear: LinearConfig, tp: TensorParallel) -> LinearConfig:
    """The same with a rank's heads, as its states have it."""
    return replace(linear, k_heads=linear.k_heads // tp.size, v_heads=linear.v_heads // tp.size)


class DecoderLayer(nn.Module):
    """One layer. Sums are left to the norm that reads them next, which on a device makes them in passing."""

    def __init__(self, source: str, layer: int, config: TextConfig, at: Placement) -> None:
        super().__init__()
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.spec.norm_offset
        self.norm1 = RMSNorm(f"{source}.input_layernorm", size, eps, at, offset)
        recurrent = config.linear.layers if config.linear else ()
        before = sum(i < layer for i in recurrent)
        self.attention: nn.Module
        if config.linear and layer in recurrent:
            self.attention = GatedDeltaNet(f"{source}.linear_attn", before, config, config.linear, at)
        else:
            self.attention = Attention(f"{source}.self_attn", layer - before, config, at)
        self.norm2 = RMSNorm(f"{source}.post_attention_layernorm", size, eps, at, offset)
        self.mlp: nn.Module
        if config.experts:
            self.mlp = MixtureOfExperts(f"{source}.mlp", size, config.intermediate_size, config.experts, at)
        else:
            self.mlp = GatedMLP(f"{source}.mlp", size, config.intermediate_size, bias=False, at=at)

    def forward(self, x: Tensor, residual: Tensor | None, turn: Rotation, attend: Attend) -> tuple[Tensor, Tensor]:
        """The layer's input is the sum of x and residual, its output that of the two results; x becomes the input."""
        # What a row-parallel layer returns is fresh memory, so the sums need none of their own.
        attended = self.attention(self.norm1.after_add(x, residual), turn, attend)
        return self.mlp(self.norm2.after_add(attended, x)), attended


class Decoder(nn.Module):
    """All layers and the final norm; embeddings and head are the model's."""

    def __init__(self, config: TextConfig, at: Placement) -> None:
        super().__init__()
        self.state_shape = state_shape(config.linear, at.tp) if config.linear else None
        self.rope = MRope(config, at.device)
        self.layers = nn.ModuleList(
            DecoderLayer(f"model.language_model.layers.{i}", i, config, at) for i in range(config.num_layers)
        )
        norm = "model.language_model.norm"
        self.norm = RMSNorm(norm, config.hidden_size, config.rms_norm_eps, at, config.spec.norm_offset)

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend, media: Sequence[MediaRows] = ()) -> Tensor:
        """See `VisionLanguageModel.forward`; `hidden` holds the first columns of `media` already."""
        turn, size = self.rope.tables(positions), hidden.shape[1]
        residual: Tensor | None = None
        for i, layer in enumerate(self.layers, 1):
            hidden, residual = layer(hidden, residual, turn, attend)
            for first, rows in media:
                if rows.shape[1] > i * size:
                    hidden[first : first + len(rows)] += rows[:, i * size : (i + 1) * size]
        return self.norm.after_add(hidden, residual)
