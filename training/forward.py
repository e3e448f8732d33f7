"""The training forward: the same maths as transformers' Qwen2.5-VL, batched so that two CPU cores suffice.

transformers runs the vision tower's attention window by window in a Python loop; here all temporal patches of one grid
size form one dense batch, and windows become a mask. The weights are transformers' modules, used in place.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.demo.videos import COLOURS, MOTIONS, SHAPES
from training.data import Batch, Item
from training.model import MEAN, MERGE, PATCH, STD, TEMPORAL

ATTRIBUTES = {"colour": tuple(COLOURS), "shape": SHAPES, "motion": MOTIONS}


@dataclass
class Outputs:
    """What one batch gives. A, answer tokens, the three tensors in one order; V, items."""

    logits: Tensor  # float32 [A, vocabulary], at the answers' places
    targets: Tensor  # int64 [A]
    rows: Tensor  # int64 [A]: the sample of each answer token
    features: list[Tensor]  # V times float32 [num_tokens, hidden]: each item's merged vision features


class AttributeHead(nn.Module):
    """The training aid: names colour, shape and motion from an item's vision features, pooled. It is not saved.

    The greatest feature beside the mean: most tokens show the background, and of the mean alone shape and motion are
    learned five times as late.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(2 * hidden, len(values)) for name, values in ATTRIBUTES.items()})

    def loss(self, features: list[Tensor], items: list[Item]) -> Tensor:
        """Summed cross entropies of the attributes of `items` from their features, float32 [num_tokens, hidden]."""
        pooled = torch.stack([torch.cat([part.mean(0), part.amax(0)]) for part in features])
        total = pooled.new_zeros(())
        for name, values in ATTRIBUTES.items():
            wanted = [values.index(getattr(item, name) or "still") for item in items]
            total = total + F.cross_entropy(self.heads[name](pooled), torch.tensor(wanted, device=pooled.device))
        return total


def normalised(patches: Tensor) -> Tensor:
    """uint8 patches [N, 3 * TEMPORAL * PATCH * PATCH] as the processor's floats, float32 of the same shape."""
    scale = torch.tensor(STD, device=patches.device).repeat_interleave(TEMPORAL * PATCH * PATCH) * 255
    shift = torch.tensor(MEAN, device=patches.device).repeat_interleave(TEMPORAL * PATCH * PATCH) * 255
    return (patches.float() - shift) / scale


def vision_features(visual: Any, items: list[Item]) -> list[Tensor]:
    """Merged features of each item, float32 [num_tokens, hidden]; items of one frame size run as one batch."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.grid[1:], []).append(index)
    features: list[Tensor] = [torch.empty(0)] * len(items)
    device = visual.patch_embed.proj.weight.device
    for (height, width), members in groups.items():
        patches = torch.cat([items[index].patches() for index in members]).to(device)
        merged = _tower(visual, normalised(patches), height, width)
        sizes = [items[index].num_tokens for index in members]
        for index, part in zip(members, merged.split(sizes), strict=True):
            features[index] = part
    return features


def _tower(visual: Any, patches: Tensor, height: int, width: int) -> Tensor:
    """The vision tower over temporal patches of `height` x `width` patches each, in the processor's patch order."""
    config = visual.config
    cells, heads = height * width, config.num_heads
    x = F.linear(patches, visual.patch_embed.proj.weight.flatten(1)).view(-1, cells, config.hidden_size)
    rows, columns = _patch_places(height, width, x.device)
    cos, sin = _rotary(rows, columns, config.hidden_size // heads)
    side = config.window_size // PATCH
    window = (rows // side) * width + columns // side
    same_window = window[:, None] == window[None, :]
    for number, block in enumerate(visual.blocks):
        normed = F.rms_norm(x, x.shape[-1:], block.norm1.weight, 1e-6)
        q, k, v = block.attn.qkv(normed).view(len(x), cells, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k = q * cos + _rotate(q) * sin, k * cos + _rotate(k) * sin
        mask = None if number in config.fullatt_block_indexes else same_window
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + block.attn.proj(mixed.transpose(1, 2).reshape(len(x), cells, -1))
        x = x + block.mlp(F.rms_norm(x, x.shape[-1:], block.norm2.weight, 1e-6))
    x = F.rms_norm(x, x.shape[-1:], visual.merger.ln_q.weight, 1e-6)
    return visual.merger.mlp(x.view(-1, MERGE**2 * config.hidden_size))


def _patch_places(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column, int64 [height * width], of each patch in the processor's order: merged cell by merged cell."""
    grid = torch.arange(height * width, device=device).view(height // MERGE, MERGE, width // MERGE, MERGE)
    order = grid.transpose(1, 2).flatten()
    return order // width, order % width


def _rotary(rows: Tensor, columns: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [patches, head_dim]: a quarter of the angles by row, a quarter by column, twice."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim // 2, 2, device=rows.device).float() / (head_dim // 2))
    angles = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], -1).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _similar(lengths: Tensor, most: int) -> list[Tensor]:
    """Split samples, by rising length, into groups of at most `most` tokens with their padding, or of one sample."""
    groups: list[list[int]] = []
    for index in lengths.argsort().tolist():
        if not groups or (len(groups[-1]) + 1) * int(lengths[index]) > most:
            groups.append([])
        groups[-1].append(index)
    return [torch.tensor(group, device=lengths.device) for group in groups]


def run(model: Any, batch: Batch, tokens_at_once: int = 1024) -> Outputs:
    """Run a batch through a `Qwen2_5_VLForConditionalGeneration`; logits are computed at the answers' places only.

    The decoder takes samples of similar length at a time, `tokens_at_once` or one sample, so that little of its work is
    padding.
    """
    device = model.lm_head.weight.device
    features = vision_features(model.model.visual, batch.items)
    ids, labels, positions = (t.to(device) for t in (batch.input_ids, batch.labels, batch.positions))
    embeds = model.model.language_model.embed_tokens(ids)
    pads = (ids == model.config.image_token_id) | (ids == model.config.video_token_id)
    if features:
        embeds = embeds.masked_scatter(pads[..., None], torch.cat(features))
    lengths = (labels != -100).long().mul(torch.arange(1, ids.shape[1] + 1, device=device)).amax(-1)
    logits, targets, rows = [], [], []
    for members in _similar(lengths, tokens_at_once):
        length = int(lengths[members].max())
        hidden = model.model.language_model(
            inputs_embeds=embeds[members, :length], position_ids=positions[:, members, :length], use_cache=False
        ).last_hidden_state
        following = labels[members, 1:length]
        wanted = following != -100
        logits.append(model.lm_head(hidden[:, :-1][wanted]))
        targets.append(following[wanted])
        rows.append(members[wanted.nonzero()[:, 0]])
    return Outputs(torch.cat(logits), torch.cat(targets), torch.cat(rows), features)
