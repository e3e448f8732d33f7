"""The vision tower of Qwen3-VL (Bai et al. 2025): LayerNorm, MLPs with GELU, all layers within whole frames, learned
positions besides the rotary ones, and rows that hold the output of some layers as well."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.model.config import VisionConfig
from mini_engine.model.layers import MLP, Layer, LayerNorm
from mini_engine.model.parallel import Placement
from mini_engine.model.towers.vision import NORM_EPS, Layout, PatchMerger, VisionTower


class Qwen3VisionTower(VisionTower):
    norm = LayerNorm
    patch_bias = True

    def __init__(self, config: VisionConfig, at: Placement) -> None:
        super().__init__(config, at)
        self.positions = LearnedPositions("model.visual.pos_embed", config, at)

    def make_mlp(self, source: str, at: Placement) -> nn.Module:
        size, inner = self.config.hidden_size, self.config.intermediate_size
        gelu = partial(F.gelu, approximate="tanh")
        return MLP([f"{source}.linear_fc1"], f"{source}.linear_fc2", (size, inner, size), gelu, bias=True, at=at)

    def make_merger(self, source: str, at: Placement) -> nn.Module:
        return self._merger(source, self.config.hidden_size, at)

    def make_deepstack(self, source: str, at: Placement) -> nn.Module:
        return self._merger(source, self.config.hidden_size * self.config.merge_unit, at)

    def _merger(self, source: str, normed: int, at: Placement) -> nn.Module:
        norm = LayerNorm(f"{source}.norm", normed, NORM_EPS, at)
        return PatchMerger(norm, f"{source}.linear_fc1", f"{source}.linear_fc2", self.config, at)

    def embed(self, patches: Tensor, where: Layout) -> Tensor:
        x = super().embed(patches, where)
        return x.add_(self.positions(where).to(x.dtype))


class LearnedPositions(Layer):
    """A square table of positions, stretched over each frame: corner on corner, bilinear in between. Replicated."""

    def __init__(self, source: str, config: VisionConfig, at: Placement) -> None:
        super().__init__()
        self.source, self.side = source, config.position_side
        self.weight = at.empty(self.side**2, config.hidden_size)

    def forward(self, where: Layout) -> Tensor:
        """float32 `[n, hidden_size]`, in the tower's order."""
        at = where.coordinates.float() * (self.side - 1) / (where.sizes - 1).clamp(min=1)
        low = at.floor().long()
        share = at - low
        corners = ((low, 1 - share), ((low + 1).clamp(max=self.side - 1), share))
        total = torch.zeros(len(at), self.weight.shape[1], device=at.device)
        for rows, row_share in corners:
            for columns, column_share in corners:
                near = F.embedding(rows[:, 0] * self.side + columns[:, 1], self.weight)
                total.addcmul_(near.float(), (row_share[:, 0] * column_share[:, 1]).unsqueeze(1))
        return total
