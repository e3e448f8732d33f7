"""What the results must be: plain attention with an unbounded cache, and prompts through the model, whole or in chunks.

The worker has its own paged attention, and its own place for states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_engine.kernels import ops
from mini_engine.kernels.quantized import MatrixPart
from mini_engine.model import delta_rule
from mini_engine.model.config import LinearConfig, ModelConfig
from mini_engine.model.layers import pieces_of
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.rope import Grid, PlacedRun, PromptPositions, mrope_positions
from mini_engine.model.text import MediaRows
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model


class ReferenceAttention:
    """Causal attention with a cache, and the gated delta rule with a state, per (layer, sequence); an `attend` hook.

    Call `step` before each forward pass, then hand the object itself over as `attend`.
    """

    def __init__(self, states: LinearConfig | None = None) -> None:
        self._shape = states
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._states: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._batch: list[tuple[int, int]] = []

    def step(self, batch: Sequence[tuple[int, int]]) -> "ReferenceAttention":
        """Say what the next flat batch holds: (sequence, new tokens), in order. Returns itself."""
        self._batch = list(batch)
        return self

    def __call__(self, layer: int, heads: ops.Heads) -> Tensor:
        """As `text.Attend`; products and softmax in float32."""
        q, k, v = ops.rotate_heads(heads)
        outputs, start = [], 0
        for sequence, count in self._batch:
            new = slice(start, start + count)
            keys, values = k[new], v[new]
            if (layer, sequence) in self._cache:
                old_keys, old_values = self._cache[layer, sequence]
                keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
            self._cache[layer, sequence] = (keys, values)
            outputs.append(causal_attention(q[new], keys, values))
            start += count
        return torch.cat(outputs)

    def recur(self, layer: int, x: Tensor, gates: Tensor, weights: delta_rule.Weights) -> Tensor:
        """As `text.Attend`; a single token is decoded, in the second state of two."""
        s, outputs, start = self._shape, [], 0
        for sequence, count in self._batch:
            rows = x[start : start + count], gates[start : start + count]
            empty = torch.zeros(2, s.channels, s.kernel_size - 1).to(x), torch.zeros(2, s.v_heads, s.k_dim, s.v_dim)
            conv, delta = self._states.setdefault((layer, sequence), empty)
            if count == 1:
                outputs.append(delta_rule.decode(*rows, weights, s, conv, delta, torch.tensor([1])))
            else:
                outputs.append(delta_rule.prefill(*rows, weights, s, conv[1], delta[1]))
            start += count
        return torch.cat(outputs)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`softmax(q k^T / sqrt(head_dim)) v`, the queries being the last of the keys' tokens.

    q `[n, heads, head_dim]`, k and v `[m, kv_heads, head_dim]` with m >= n -> `[n, heads, head_dim]` in q's dtype.
    """
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * q.shape[-1] ** -0.5
    future = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype)


@dataclass(frozen=True)
class Prompt:
    """A prompt with placeholders expanded. Patches `[t * h * w, patch_dim]` are normalised; items of one modality are
    in order of appearance, and `seconds` is per video, between two temporal patches."""

    token_ids: Sequence[int]
    images: Sequence[tuple[Tensor, Grid]] = ()
    videos: Sequence[tuple[Tensor, Grid]] = ()
    seconds: Sequence[float] = ()


def media_at(places: Tensor, rows: Tensor) -> list[MediaRows]:
    """Rows `[n, row_size]` for the places `[n]` of a batch, ascending: one piece for each run of places."""
    gaps = torch.nonzero(places.diff() != 1).flatten() + 1
    runs = zip(places.tensor_split(gaps), rows.tensor_split(gaps), strict=True)
    return [MediaRows(int(run[0]), part) for run, part in runs if len(run)]


def reference_logits(
    model: VisionLanguageModel, prompts: Sequence[Prompt], size: int = 1 << 30, attend: ReferenceAttention | None = None
) -> list[Tensor]:
    """Logits `[tokens, vocab_size]` per prompt; none on ranks but the first. Each step takes the next `size` tokens of
    every prompt that has any left, by default all, in one flat batch.

    The i-th prompt is sequence i of `attend`, which keeps the keys and values for decoding further.
    """
    attend = attend or ReferenceAttention(model.state_shape)
    for_media = torch.tensor([model.config.image_token_id, model.config.video_token_id])
    rows, positions = [media_rows(model, each) for each in prompts], [place(model, each).positions for each in prompts]
    outputs: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(len(each.token_ids) for each in prompts), size):
        stop = start + size
        left = [i for i, each in enumerate(prompts) if start < len(each.token_ids)]
        counts = [len(prompts[i].token_ids[start:stop]) for i in left]
        tokens = torch.cat([torch.as_tensor(prompts[i].token_ids[start:stop]) for i in left])
        places = torch.nonzero(torch.isin(tokens, for_media)).flatten()
        media = media_at(places, torch.cat([rows[i][start:stop] for i in left])[places])
        step = attend.step(list(zip(left, counts, strict=True)))
        axes = torch.cat([positions[i][:, start:stop] for i in left], dim=1)
        logits = model.logits(model(model.embed(tokens, media), axes, step, media))
        for i, part in zip(left, logits.split(counts) if logits is not None else (), strict=logits is not None):
            outputs[i].append(part)
    return [torch.cat(parts) for parts in outputs if parts]


def place(model: VisionLanguageModel, prompt: Prompt) -> PromptPositions:
    """Where the prompt's tokens stand."""
    grids = [grid for _, grid in prompt.images], [grid for _, grid in prompt.videos]
    runs = find_runs(prompt.token_ids, *grids, prompt.seconds, model.config)
    return mrope_positions(len(prompt.token_ids), runs, model.config.vision)


def find_runs(
    ids: Sequence[int], images: Sequence[Grid], videos: Sequence[Grid], seconds: Sequence[float], config: ModelConfig
) -> list[PlacedRun]:
    """The runs of placeholders in a prompt; grids and seconds as in a `Prompt`."""
    left = {config.image_token_id: [(grid, None) for grid in images]}
    left[config.video_token_id] = whole = [*zip(videos, seconds, strict=True)]
    starts = [at for at, each in enumerate(ids) if each in left and (at == 0 or ids[at - 1] != each)]
    if sum(ids[at] == config.video_token_id for at in starts) > len(videos):  # text between temporal grids
        left[config.video_token_id] = [((1, h, w), each) for (t, h, w), each in whole for _ in range(t)]
    return [PlacedRun(at, *left[ids[at]].pop(0)) for at in starts]


def media_rows(model: VisionLanguageModel, prompt: Prompt) -> Tensor:
    """`[tokens, row_size]`: the vision tower's row of each placeholder, zeros for other tokens."""
    config, ids = model.config, torch.as_tensor(prompt.token_ids)
    dtype = next(model.parameters()).dtype
    rows = torch.zeros(len(ids), config.vision.row_size, dtype=dtype)
    for token, items in ((config.image_token_id, prompt.images), (config.video_token_id, prompt.videos)):
        if items:
            patches = torch.cat([patches for patches, _ in items])
            rows[ids == token] = torch.cat(model.encode_vision(patches, [grid for _, grid in items]))
    return rows


def in_dtype(prompt: Prompt, dtype: torch.dtype) -> Prompt:
    """The prompt for a model of that dtype."""
    images, videos = ([(patches.to(dtype), grid) for patches, grid in each] for each in (prompt.images, prompt.videos))
    return replace(prompt, images=images, videos=videos)


def load(path: Path, dtype: torch.dtype | None = None, **more: Any) -> VisionLanguageModel:
    """On one rank, on the CPU. `more`: arguments of `load_model`."""
    return load_model(path, TensorParallel(), dtype, torch.device("cpu"), **more)


def values_of(model: VisionLanguageModel) -> dict[str, Tensor]:
    """The values of a model on one rank that is not packed, by the checkpoint's names, but the head's copy of a tied
    table."""
    tensors: dict[str, Tensor] = {}
    for piece in pieces_of(model):
        target = piece.target
        if isinstance(target, MatrixPart):
            target = target.matrix.codes_of(target.rows).dequantize()
        tensors.setdefault(piece.source, torch.empty(piece.shape))[piece.index] = target
    return tensors
