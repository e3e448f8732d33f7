"""Rotary positions: the three axes of M-RoPE for a prompt, and the rotation itself.

Angles are computed in float32 from frequencies that are kept outside the modules, so that converting a model to a
narrower dtype cannot touch them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.model.config import TextConfig, VisionConfig

Grid = tuple[int, int, int]
"""One item's patches as (time, height, width); an image has time 1."""


class PromptPositions(NamedTuple):
    """`positions` int64 `[3, n]` (time, height, width); the i-th token after the prompt stands at `next_position + i`
    on all three axes."""

    positions: Tensor
    next_position: int


class PlacedRun(NamedTuple):
    """One run of placeholders in a prompt: a whole media item, or a temporal grid of one if text tells the time."""

    start: int  # in the prompt's tokens
    grid: Grid
    second_per_grid: float | None  # between two temporal grids; None for an image


def mrope_positions(num_tokens: int, runs: Sequence[PlacedRun], vision: VisionConfig) -> PromptPositions:
    """Positions of a prompt's tokens, as transformers 5.23 computes them for each family (`get_rope_index`).

    Text counts up on all three axes. A run starts where the text before it ended: its time axis advances by one per
    temporal grid, or by `tokens_per_second` x seconds per grid, each product cut to an integer; its height and width
    axes count merged patches. Text continues at the run's start plus its longer side. The next position is one past the
    prompt's last token, as in transformers' `generate`: a token stands where it stands whether it was decoded or is
    part of a longer prompt. (`rope_deltas`, one past the largest position, would put it behind a long video's last
    frame.) `runs` are in the prompt's order.
    """
    parts: list[Tensor] = []
    done = position = 0
    for run in runs:
        parts.append(_text(position, run.start - done))
        position += run.start - done
        parts.append(_positions_in(run, vision) + position)
        position += max(run.grid[1:]) // vision.spatial_merge_size
        done = run.start + parts[-1].shape[1]
    positions = torch.cat((*parts, _text(position, num_tokens - done)), dim=1)
    return PromptPositions(positions, int(positions[:, -1].max()) + 1)


def _positions_in(run: PlacedRun, vision: VisionConfig) -> Tensor:
    """int64 `[3, merged patches]`, counted from the run's own start."""
    (t, h, w), merge = run.grid, vision.spatial_merge_size
    time = torch.arange(t)
    if run.second_per_grid is not None and vision.tokens_per_second is not None:
        # In float32, as transformers does with the processor's tensor: the cut to an integer must fall alike.
        step = vision.tokens_per_second * torch.tensor(run.second_per_grid, dtype=torch.float32)
        time = (time * step).to(torch.int64)
    axes = torch.meshgrid(time, torch.arange(h // merge), torch.arange(w // merge), indexing="ij")
    return torch.stack(axes).flatten(1)


def _text(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, -1)


Rotation = tuple[Tensor, Tensor]
"""Tables for `ops.rotate`, float32 `[n, 1, rotary_dim]`: cosines, and sines whose first half is negated."""


def inverse_frequencies(theta: float, size: int, device: torch.device) -> Tensor:
    """`theta^(-2i/size)` for i in [0, size / 2), float32."""
    # On the CPU first: a device's own power function may differ in the last bit, which far positions magnify.
    return (1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)).to(device)


class MRope:
    """M-RoPE tables of the decoder (Qwen2-VL, Wang et al. 2024): frequency i turns by the axis of its section."""

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        # Twice, the first half negated, as the sines of a `Rotation` are; a cosine is that of the negated angle.
        inv_freq = inverse_frequencies(config.rope_theta, config.rotary_dim, device)
        self.frequencies = torch.cat((-inv_freq, inv_freq))
        sections = config.mrope_section
        if config.spec.mrope_interleaved:  # THWTHW...TTT: every third is height's or width's until its section is full
            axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections))]
        else:  # TTT...HHH...WWW
            axes = [axis % 3 for axis, count in enumerate(sections) for _ in range(count)]
        self.axis = torch.tensor(2 * axes, device=device)

    def tables(self, positions: Tensor) -> Rotation:
        """int64 `[3, n]` -> tables for n tokens."""
        angles = (positions.T.index_select(1, self.axis) * self.frequencies).unsqueeze(1)
        return angles.cos(), angles.sin()
