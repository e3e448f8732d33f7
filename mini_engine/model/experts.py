"""Mixtures of experts: a router chooses for each token a few of many gated MLPs, whose outputs are summed by weight
(Shazeer et al. 2017, with the softmax over the chosen ones). Each rank holds a slice of every expert.

Pairs of a token and one of its experts are sorted by expert, so that an expert's rows lie together. Each expert that
has rows is two products, and the others are not read.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.model.config import ExpertsConfig
from mini_engine.model.layers import GatedMLP, Layer
from mini_engine.model.parallel import Placement


class Gate(Layer):
    """`x W^T` with a small matrix that decides over experts: dense, and whole on every rank."""

    def __init__(self, source: str, inputs: int, outputs: int, at: Placement) -> None:
        super().__init__()
        self.source, self.weight = source, at.empty(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Experts(nn.ModuleList):
    """Gated MLPs, each with its own matrices; a rank's term of their outputs."""

    def __init__(self, source: str, size: int, inner: int, count: int, at: Placement) -> None:
        made = (GatedMLP(f"{source}.{i}", size, inner, bias=False, at=at, is_summed=False) for i in range(count))
        super().__init__(made)

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        """`[n, size]` -> `[n, size]`, row i by expert number `experts[i]`; int64 `[n]`, ascending."""
        chosen, counts = experts.unique_consecutive(return_counts=True)
        parts = rows.split(counts.tolist())
        return torch.cat([self[expert](part) for expert, part in zip(chosen.tolist(), parts, strict=True)])


class MixtureOfExperts(nn.Module):
    """`sum_i weight_i expert_i(x)` over the experts of the largest scores, and with a shared expert
    `sigmoid(gate x) * shared(x)` (Qwen1.5-MoE) besides.

    Args:
        source: the layer's name in checkpoints.
        inner: inner size of an expert.
    """

    def __init__(self, source: str, size: int, inner: int, config: ExpertsConfig, at: Placement) -> None:
        super().__init__()
        self.top_k, self.tp = config.top_k, at.tp
        self.router = Gate(f"{source}.gate", size, config.count, at)
        self.experts = Experts(f"{source}.experts", size, inner, config.count, at)
        self.shared: GatedMLP | None = None
        if config.shared_size:
            name = f"{source}.shared_expert"
            self.shared = GatedMLP(name, size, config.shared_size, bias=False, at=at, is_summed=False)
            self.shared_gate = Gate(f"{name}_gate", size, 1, at)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, size]` -> `[n, size]`, the same on every rank."""
        # A softmax over the chosen scores is one over all of them, divided by the sum of the chosen.
        scores, chosen = self.router(x).float().topk(self.top_k)
        weights = scores.softmax(-1).to(x.dtype)
        experts, order = chosen.flatten().sort()
        outputs = self.experts(x.index_select(0, order // self.top_k), experts)
        by_token = torch.empty_like(outputs).index_copy_(0, order, outputs).view(len(x), self.top_k, -1)
        y = torch.bmm(weights.unsqueeze(1), by_token).squeeze(1)
        if self.shared is not None:
            y.addcmul_(self.shared_gate(x).sigmoid(), self.shared(x))
        return self.tp.all_reduce(y)
