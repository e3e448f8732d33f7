"""The vision tower of Qwen2.5-VL (Bai et al. 2025): RMSNorm, gated MLPs, most layers within windows."""

from torch import nn

from mini_engine.model.layers import GatedMLP, RMSNorm
from mini_engine.model.parallel import Placement
from mini_engine.model.towers.qwen2_vl import Qwen2VisionTower


class Qwen2_5VisionTower(Qwen2VisionTower):
    norm = RMSNorm

    def make_mlp(self, source: str, at: Placement) -> nn.Module:
        return GatedMLP(source, self.config.hidden_size, self.config.intermediate_size, bias=True, at=at)
