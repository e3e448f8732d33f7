"""Rotary positions: the three axes of M-RoPE for a prompt, and the rotation itself.

Angles are computed in float32 from frequencies that are kept outside the modules, so that converting a model to a
narrower dtype cannot touch them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.kernels import ops
from mini_engine.model.config import ModelConfig, TextConfig

Grid = tuple[int, int, int]
"""One item's patches as (time, height, width); an image has time 1."""


class PromptPositions(NamedTuple):
    """`positions` int64 `[3, n]` (time, height, width); the i-th token after the prompt stands at `next_position + i`
    on all three axes."""

    positions: Tensor
    next_position: int


def mrope_positions(
    token_ids: Sequence[int] | Tensor,
    image_grids: Sequence[Grid],
    video_grids: Sequence[Grid],
    second_per_grid_ts: Sequence[float],
    config: ModelConfig,
) -> PromptPositions:
    """Positions of a prompt's tokens, as transformers 5.23 computes them for each family (`get_rope_index`).

    Text counts up on all three axes. An item starts where the text before it ended: its time axis advances by one per
    temporal patch, or by `tokens_per_second` x seconds per temporal patch, each product cut to an integer; its height
    and width axes count merged patches. Text goes on at the item's start plus its longer side. Where text tells the
    time, every temporal patch of a video is placed by itself, as an image is. The next position is one past the
    prompt's last token, as in transformers' `generate`: a token stands where it stands whether it was decoded or is
    part of a longer prompt. (`rope_deltas`, one past the largest position, would put it behind a long video's last
    frame.)

    Args:
        token_ids: the prompt, placeholders expanded to one per merged patch.
        image_grids, video_grids: per modality in order of appearance, in patches before merging.
        second_per_grid_ts: per video, seconds between two temporal patches; used where positions count seconds.

    Raises:
        ValueError: the placeholders do not match the grids.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    if len(second_per_grid_ts) != len(video_grids):
        raise ValueError(f"{len(video_grids)} videos but {len(second_per_grid_ts)} values of second_per_grid_ts")
    images = [_Item(config.image_token_id, grid, None) for grid in reversed(image_grids)]
    videos = _videos(video_grids, second_per_grid_ts, config)[::-1]
    waiting = {config.image_token_id: images, config.video_token_id: videos}
    # Start of every item still to place; a plain scan in Python would be slow for long prompts.
    placeholders = torch.nonzero((ids == config.image_token_id) | (ids == config.video_token_id)).flatten().tolist()
    parts: list[Tensor] = []
    done, position, passed = 0, 0, 0
    while passed < len(placeholders):
        start = placeholders[passed]
        item = _take(waiting, int(ids[start]), start)
        here = item.positions(config)
        end = start + here.shape[1]
        if end > len(ids) or bool((ids[start:end] != item.token_id).any()):
            raise ValueError(f"the item at token {start} needs {here.shape[1]} placeholders for grid {item.grid}")
        parts.append(_text(position, start - done))
        position += start - done
        parts.append(here + position)
        position += max(item.grid[1:]) // config.vision.spatial_merge_size
        done, passed = end, passed + here.shape[1]
    if images or videos:
        raise ValueError(f"{len(images)} images and {len(videos)} videos have no placeholder in the prompt")
    parts.append(_text(position, len(ids) - done))
    positions = torch.cat(parts, dim=1)
    return PromptPositions(positions, int(positions[:, -1].max()) + 1 if positions.numel() else 0)


@dataclass(frozen=True)
class _Item:
    token_id: int
    grid: Grid
    seconds: float | None

    def positions(self, config: ModelConfig) -> Tensor:
        """int64 `[3, merged patches]`, counted from the item's own start."""
        merge = config.vision.spatial_merge_size
        t, h, w = self.grid[0], self.grid[1] // merge, self.grid[2] // merge
        # In float32, as transformers does with the processor's tensor: the cut to an integer must fall alike.
        step = torch.tensor(1.0 if self.seconds is None else self.seconds, dtype=torch.float32)
        if self.seconds is not None and config.vision.tokens_per_second is not None:
            step = config.vision.tokens_per_second * step
        time = (torch.arange(t) * step).to(torch.int64)
        axes = torch.meshgrid(time, torch.arange(h), torch.arange(w), indexing="ij")
        return torch.stack(axes).flatten(1)


def _videos(grids: Sequence[Grid], seconds: Sequence[float], config: ModelConfig) -> list[_Item]:
    """What is placed by itself of each video, in order."""
    token_id = config.video_token_id
    if config.video_time == "text":
        return [_Item(token_id, (1, h, w), None) for t, h, w in grids for _ in range(t)]
    counted = seconds if config.video_time == "seconds" else [None] * len(grids)
    return [_Item(token_id, grid, each) for grid, each in zip(grids, counted, strict=True)]


def _take(waiting: dict[int, list[_Item]], token_id: int, at: int) -> _Item:
    if not waiting[token_id]:
        raise ValueError(f"the placeholder at token {at} has no media item")
    return waiting[token_id].pop()


def _text(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, -1)


class Rotation(NamedTuple):
    """Tables for `rotate`, float32 `[n, 1, head_dim]`: cosines, and sines whose first half is negated."""

    cos: Tensor
    sin: Tensor


def rotation(angles: Tensor) -> Rotation:
    """Tables for float32 `angles` `[n, head_dim / 2]`."""
    return Rotation(*ops.rotary_tables(angles))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn `[n, heads, head_dim]`, whose heads are contiguous; see `ops.rotate`."""
    return ops.rotate(x, by.cos, by.sin)


def inverse_frequencies(theta: float, size: int, device: torch.device) -> Tensor:
    """`theta^(-2i/size)` for i in [0, size / 2), float32."""
    # On the CPU first: a device's own power function may differ in the last bit, which far positions magnify.
    return (1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)).to(device)


class MRope:
    """M-RoPE tables of the decoder (Qwen2-VL, Wang et al. 2024): frequency i turns by the axis of its section."""

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        self.inv_freq = inverse_frequencies(config.rope_theta, config.head_dim, device)
        axes = _interleaved_axes if config.mrope_interleaved else _sectioned_axes
        self.axis = torch.tensor(axes(config.mrope_section), device=device)

    def tables(self, positions: Tensor) -> Rotation:
        """int64 `[3, n]` -> tables for n tokens."""
        return Rotation(*ops.mrope_tables(positions, self.axis, self.inv_freq))


def _sectioned_axes(sections: Sequence[int]) -> list[int]:
    """TTT...HHH...WWW: the axis of each frequency, sections one after the other."""
    return [axis % 3 for axis, count in enumerate(sections) for _ in range(count)]


def _interleaved_axes(sections: Sequence[int]) -> list[int]:
    """THWTHW...TTT: height and width take every third frequency until their sections are full, time all others."""
    return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections))]
