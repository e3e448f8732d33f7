"""The vision tower of Qwen2-VL (Wang et al. 2024): LayerNorm, MLPs with quick GELU, all layers within whole frames."""

import torch
from torch import Tensor, nn

from mini_engine.model.layers import MLP, LayerNorm, RMSNorm
from mini_engine.model.parallel import Placement
from mini_engine.model.towers.vision import NORM_EPS, PatchMerger, VisionTower


class Qwen2VisionTower(VisionTower):
    norm: type[LayerNorm | RMSNorm] = LayerNorm

    def make_mlp(self, source: str, at: Placement) -> nn.Module:
        size, inner = self.config.hidden_size, self.config.intermediate_size
        return MLP([f"{source}.fc1"], f"{source}.fc2", (size, inner, size), quick_gelu, bias=True, at=at)

    def make_merger(self, source: str, at: Placement) -> nn.Module:
        norm = self.norm(f"{source}.ln_q", self.config.hidden_size, NORM_EPS, at)
        return PatchMerger(norm, f"{source}.mlp.0", f"{source}.mlp.2", self.config, at)


def quick_gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)` (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)
