"""The vision tower: patches in, rows for the decoder out. What the families share; each has a file with the rest.

Several items of any sizes go through in one call. A layer attends within the whole of a frame, or within windows of it;
no layer attends across frames. The order of its segments, and of the patches inside one, does not matter to attention:
so segments of equal length lie together, and each length is one batched product without padding or mask.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.kernels import cpu_attention, ops
from mini_engine.kernels.staging import to_device
from mini_engine.matmul.linear import linear
from mini_engine.model.config import VisionConfig
from mini_engine.model.layers import MLP, ColumnParallel, Layer, LayerNorm, RMSNorm, RowParallel, Rows
from mini_engine.model.parallel import Placement
from mini_engine.model.rope import Grid, Rotation, inverse_frequencies

# Fixed in the architecture; not part of the config.
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Segments:
    """A layout in which every attention segment is contiguous.

    order: int64 `[n]`, from the tower's own order to this one; None where they are the same.
    inverse: back to the tower's own.
    groups: (segments, patches in each), in the order in which they lie.
    """

    order: Tensor | None
    inverse: Tensor | None
    groups: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """Where the patches of one call go; all tensors int64 on the tower's device.

    patches: `[n]`, from the processor's order to the tower's.
    merged: `[n / merge unit]`, from the tower's order of merged patches back to the processor's.
    coordinates: `[n, 2]`, row and column of each patch in its frame, in the tower's order.
    sizes: `[n, 2]`, rows and columns of that frame.
    """

    patches: Tensor
    merged: Tensor
    coordinates: Tensor
    sizes: Tensor
    windows: Segments
    frames: Segments


@lru_cache(maxsize=16)
def layout(grids: tuple[Grid, ...], merge: int, window: int | None, device: torch.device) -> Layout:
    """The layout for items of these grids: `merge` patches a side become one, `window` merged patches are a window.

    Without a window, the windows are the frames.
    """
    units = _units(grids, merge, window or max(max(h, w) for _, h, w in grids))
    order, window_groups = _sort_segments(units.window_length, units.window, merge**2)
    frame_order, frame_groups = _sort_segments(units.frame_length[order], units.frame[order], merge**2)
    corner = torch.cartesian_prod(torch.arange(merge), torch.arange(merge))
    coordinates = (units.corner[order].unsqueeze(1) * merge + corner).flatten(0, 1)
    frames = Segments(None, None, frame_groups)
    if not torch.equal(frame_order, torch.arange(len(frame_order))):
        to_frames = _expand(frame_order, merge**2)
        frames = Segments(to_device(to_frames, device), to_device(torch.argsort(to_frames), device), frame_groups)
    return Layout(
        patches=to_device(_expand(order, merge**2), device),
        merged=to_device(torch.argsort(order), device),
        coordinates=to_device(coordinates, device),
        sizes=to_device((units.size[order] * merge).repeat_interleave(merge**2, 0), device),
        windows=Segments(None, None, window_groups),
        frames=frames,
    )


class _Units(NamedTuple):
    """Per merged patch of a call, in the processor's order: the segments that it belongs to, and their lengths."""

    corner: Tensor  # [units, 2] row and column in the frame
    size: Tensor  # [units, 2] of the frame, in merged patches
    window: Tensor
    window_length: Tensor
    frame: Tensor
    frame_length: Tensor


def _units(grids: Sequence[Grid], merge: int, window: int) -> _Units:
    columns: list[tuple[Tensor, ...]] = []
    first_window = first_frame = 0
    for t, grid_h, grid_w in grids:
        h, w = grid_h // merge, grid_w // merge
        across, down = -(-w // window), -(-h // window)
        frame, row, col = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
        top, left = row // window, col // window
        length = (h - top * window).clamp(max=window) * (w - left * window).clamp(max=window)
        index = first_window + (frame * down + top) * across + left
        corner = torch.stack((row, col), dim=-1).flatten(0, 2)
        parts = (index, length, frame + first_frame, torch.full_like(frame, h * w))
        columns.append((corner, torch.tensor([[h, w]]).expand_as(corner), *(part.flatten() for part in parts)))
        first_window += t * down * across
        first_frame += t
    return _Units(*(torch.cat(column) for column in zip(*columns, strict=True)))


def _sort_segments(lengths: Tensor, segments: Tensor, unit: int) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Order by (length, segment), stable within a segment; and `Segments.groups`, in units of so many patches."""
    order = torch.argsort(lengths * (int(segments.max()) + 1) + segments, stable=True)
    values, counts = torch.unique_consecutive(lengths[order], return_counts=True)
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return order, tuple((count // length, length * unit) for length, count in pairs)


def _expand(order: Tensor, unit: int) -> Tensor:
    return (order.unsqueeze(1) * unit + torch.arange(unit)).flatten()


def segment_attention(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
    """Full attention inside each segment; `[n, heads, head_dim]` each -> `[n, heads * head_dim]`."""
    outputs, start = [], 0
    for count, length in groups:
        end = start + count * length
        parts = [x[start:end].unflatten(0, (count, length)) for x in (q, k, v)]
        if cpu_attention.attends(q, length, length):
            outputs.append(cpu_attention.attend_all(*parts).flatten(0, 1))
        else:
            attended = ops.attention(*(x.transpose(1, 2) for x in parts))
            outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
        start = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def last_of(blocks: Iterator[Tensor]) -> Tensor:
    """The last item: the rows of a tower's `run`."""
    return deque(blocks, maxlen=1).pop()


class PatchEmbed(Layer):
    """One linear map of a flattened patch: a convolution whose stride is its kernel. Replicated."""

    def __init__(self, source: str, config: VisionConfig, bias: bool, at: Placement) -> None:
        super().__init__()
        self.source = source
        p = config.patch_size
        self.weight = at.empty(config.hidden_size, config.in_channels, config.temporal_patch_size, p, p)
        self.bias = at.empty(config.hidden_size) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        return linear(patches, self.weight.flatten(1), self.bias)


class VisionAttention(nn.Module):
    """Rotary self-attention within segments, heads split over the ranks."""

    def __init__(self, source: str, config: VisionConfig, at: Placement) -> None:
        super().__init__()
        size = config.hidden_size
        heads = at.tp.part(config.num_heads)
        self.heads, self.head_dim = heads.stop - heads.start, config.head_dim
        part = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        # The checkpoint's one matrix holds q, k and v below each other: a rank takes its heads out of each.
        rows = [Rows(f"{source}.qkv", 3 * size, slice(o + part.start, o + part.stop)) for o in (0, size, 2 * size)]
        self.qkv = ColumnParallel(size, rows, bias=True, at=at)
        self.proj = RowParallel(f"{source}.proj", size, part, size, bias=True, at=at)

    def forward(self, x: Tensor, turn: Rotation, groups: Sequence[tuple[int, int]]) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3 * self.heads, self.head_dim))
        qk, v = qkv.split((2 * self.heads, self.heads), dim=1)
        q, k = ops.rotate(qk, *turn).chunk(2, dim=1)
        return self.proj(segment_attention(q, k, v, groups))


class VisionBlock(nn.Module):
    """One layer, of a family's kind of norm and MLP."""

    def __init__(
        self, source: str, config: VisionConfig, norm: type[RMSNorm | LayerNorm], mlp: nn.Module, at: Placement
    ) -> None:
        super().__init__()
        self.norm1 = norm(f"{source}.norm1", config.hidden_size, NORM_EPS, at)
        self.attention = VisionAttention(f"{source}.attn", config, at)
        self.norm2 = norm(f"{source}.norm2", config.hidden_size, NORM_EPS, at)
        self.mlp = mlp

    def forward(self, x: Tensor, segments: Segments, turn: Rotation) -> Tensor:
        attended = self.norm1(x)
        if segments.order is not None:
            attended = attended.index_select(0, segments.order)
        attended = self.attention(attended, turn, segments.groups)
        if segments.inverse is not None:
            attended = attended.index_select(0, segments.inverse)
        return self.mlp(self.norm2.after_add(attended, x)).add_(attended)


class PatchMerger(nn.Module):
    """Joins the patches of one merge unit and maps them to the decoder's width.

    Args:
        norm: of each patch, or of the joined patches, as its size says.
        up, down: checkpoint names of the two linear maps.
    """

    def __init__(self, norm: RMSNorm | LayerNorm, up: str, down: str, config: VisionConfig, at: Placement) -> None:
        super().__init__()
        self.joined = config.hidden_size * config.merge_unit
        self.norm = norm
        self.mlp = MLP([up], down, (self.joined, self.joined, config.out_hidden_size), F.gelu, bias=True, at=at)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x.view(-1, *self.norm.weight.shape)).view(-1, self.joined))


class VisionTower(nn.Module):
    """The whole tower, sharded over the ranks; every rank gets all rows. A family chooses norm, MLP and mergers."""

    norm: type[RMSNorm | LayerNorm]
    patch_bias = False
    make_mlp: Callable[[str, Placement], nn.Module]  # of one layer, by its checkpoint name
    make_merger: Callable[[str, Placement], nn.Module]  # what follows the last layer
    make_deepstack: Callable[[str, Placement], nn.Module]  # what follows each of the `deepstack_layers`, if any

    def __init__(self, config: VisionConfig, at: Placement) -> None:
        super().__init__()
        self.config = config
        self.inv_freq = inverse_frequencies(config.rope_theta, config.head_dim // 2, at.device)
        self.patch_embed = PatchEmbed("model.visual.patch_embed.proj", config, self.patch_bias, at)
        sources = [f"model.visual.blocks.{i}" for i in range(config.depth)]
        self.blocks = nn.ModuleList(
            VisionBlock(block, config, self.norm, self.make_mlp(f"{block}.mlp", at), at) for block in sources
        )
        self.merger = self.make_merger("model.visual.merger", at)
        deeper = [f"model.visual.deepstack_merger_list.{n}" for n in range(len(config.deepstack_layers))]
        self.deepstack = nn.ModuleList(self.make_deepstack(each, at) for each in deeper)

    def run(self, patches: Tensor, grids: Sequence[Grid]) -> Iterator[Tensor]:
        """Encode all items of a call, block by block: an item for each, of which the last are the rows,
        `[n / merge unit, row_size]`, in the order of the patches; the others are hidden states.

        Args:
            patches: `[n, patch_dim]`, normalised, in the parameters' dtype, items one after the other, each in the
                processor's order (frame by frame; merge units row by row; the patches of a unit together).
            grids: per item (time, height, width) in patches; n is the sum of their products.
        """
        cfg = self.config
        where = layout(tuple(map(tuple, grids)), cfg.spatial_merge_size, cfg.merged_window, patches.device)
        x = self.embed(patches, where)
        angles = (where.coordinates.unsqueeze(-1).float() * self.inv_freq).flatten(1)
        in_windows = ops.rotary_tables(angles)
        in_frames, order = in_windows, where.frames.order
        if order is not None:
            in_frames = in_windows[0].index_select(0, order), in_windows[1].index_select(0, order)
        deeper: list[Tensor] = []
        del patches
        for i, block in enumerate(self.blocks):
            if cfg.window_size is None or i in cfg.full_attention_layers:
                x = block(x, where.frames, in_frames)
            else:
                x = block(x, where.windows, in_windows)
            if i in cfg.deepstack_layers:
                deeper.append(self.deepstack[cfg.deepstack_layers.index(i)](x))
            if i < cfg.depth - 1:
                yield x
        rows = self.merger(x)
        yield (torch.cat((rows, *deeper), dim=-1) if deeper else rows).index_select(0, where.merged)

    def embed(self, patches: Tensor, where: Layout) -> Tensor:
        """The first layer's input, `[n, hidden_size]` in the tower's order."""
        return self.patch_embed(patches).index_select(0, where.patches)
