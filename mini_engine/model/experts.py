"""Mixtures of experts: a router chooses for each token a few of many gated MLPs, whose outputs are summed by weight
(Shazeer et al. 2017, with the softmax over the chosen ones). Each rank holds a slice of every expert.

Pairs of a token and one of its experts are sorted by expert, so that an expert's rows lie together. On a CPU each
expert that has rows is two products of its own, and the others are not read. Elsewhere all are one product of groups of
rows: its shapes follow from the number of pairs alone and nothing is read back to the host, so a CUDA graph can hold
it. Not yet measured on a device.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.kernels import ops
from mini_engine.kernels.quantized import QuantizedMatrix, StackedMatrix
from mini_engine.model.checkpoint import CheckpointError
from mini_engine.model.config import ExpertsConfig
from mini_engine.model.layers import GatedMLP, Layer, WeightSlice, make_matrix, part_of
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
        sizes, layers = counts.tolist(), [self[expert] for expert in chosen.tolist()]
        # What lies between the products is one operator each for all experts: of a row it takes as long as for one.
        inner = torch.cat([layer.up(part) for layer, part in zip(layers, rows.split(sizes), strict=True)])
        parts = ops.silu_mul(inner).split(sizes)
        return torch.cat([layer.down(part) for layer, part in zip(layers, parts, strict=True)])


class GroupedExperts(Layer):
    """The same as `Experts`, by torch's product of groups; the matrices of all experts lie below each other.

    Quantised ones are unpacked before each product: those of all experts, or, where pairs are fewer than experts, that
    of each pair by itself, so that a few tokens do not read all weights.
    """

    def __init__(self, source: str, size: int, inner: int, count: int, at: Placement) -> None:
        super().__init__()
        if at.device.type == "cuda" and at.dtype is not torch.bfloat16:
            raise ValueError("torch's products of groups take bfloat16 alone on CUDA; set --dtype bfloat16")
        self.source, self.count, self.size, self.inner = source, count, size, inner
        self.part = at.tp.part(inner)
        self.held = self.part.stop - self.part.start
        self.padded = at.padded(self.held)
        self.gate_up = self._make(("gate_proj", "up_proj"), self.padded, slice(0, size), (size, size), at)
        self.down = self._make(("down_proj",), size, self.part, (inner, self.padded), at)

    def _make(
        self, names: Sequence[str], outputs: int, part: slice, lengths: tuple[int, int], at: Placement
    ) -> nn.Parameter | QuantizedMatrix:
        sources = [(f"{self.source}.{expert}.{name}", outputs) for expert in range(self.count) for name in names]
        matrix = make_matrix(sources, lengths[0], part, lengths[1], at)
        if isinstance(matrix, StackedMatrix):
            raise CheckpointError(f"{self.source} are quantised in different ways, which only --device cpu computes")
        if isinstance(matrix, nn.Parameter) and self.padded > self.held:
            matrix.zero_()  # the padding stays zero
        return matrix

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        """As of `Experts`."""
        if len(rows) < self.count and isinstance(self.gate_up, QuantizedMatrix):
            groups, ends = experts, torch.arange(1, len(rows) + 1, device=rows.device)
        else:
            groups = torch.arange(self.count, device=rows.device)
            ends = torch.searchsorted(experts, groups, right=True)
        ends = ends.to(torch.int32)
        inner = ops.silu_mul(F.grouped_mm(rows, self._matrices(self.gate_up, groups, rows.dtype).mT, offs=ends))
        return F.grouped_mm(inner, self._matrices(self.down, groups, rows.dtype).mT, offs=ends)

    def _matrices(self, matrix: nn.Parameter | QuantizedMatrix, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """`[groups, outputs, inputs]`: of a dense matrix those of all experts."""
        outputs = matrix.shape[0] // self.count
        if not isinstance(matrix, QuantizedMatrix):
            return matrix.unflatten(0, (self.count, outputs))
        rows = experts.unsqueeze(1) * outputs + torch.arange(outputs, device=experts.device)
        return matrix.codes_of(rows.flatten()).dequantize(dtype).unflatten(0, (-1, outputs))

    def pieces(self) -> Iterator[WeightSlice]:
        whole, widths = slice(0, self.size), {"gate_proj": 0, "up_proj": self.padded}
        for expert in range(self.count):
            source = f"{self.source}.{expert}"
            for name, start in widths.items():
                start += 2 * expert * self.padded
                held = part_of(self.gate_up, slice(start, start + self.held), self.size)
                yield WeightSlice(f"{source}.{name}.weight", (self.inner, self.size), (self.part,), held)
            held = part_of(self.down, slice(expert * self.size, (expert + 1) * self.size), self.held)
            yield WeightSlice(f"{source}.down_proj.weight", (self.size, self.inner), (whole, self.part), held)


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
        kind = Experts if at.device.type == "cpu" else GroupedExperts
        self.experts = kind(f"{source}.experts", size, inner, config.count, at)
        self.shared: GatedMLP | None = None
        if config.shared_size:
            name = f"{source}.shared_expert"
            self.shared = GatedMLP(name, size, config.shared_size, bias=False, at=at, is_summed=False)
            self.shared_gate = Gate(f"{name}_gate", size, 1, at)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, size]` -> `[n, size]`, the same on every rank."""
        # A softmax over the chosen scores is one over all of them, divided by the sum of the chosen.
        scores, chosen = self.router(x).float().topk(self.top_k)
        weights = scores.softmax(-1).to(x.dtype).unsqueeze(2)
        experts, order = chosen.flatten().sort()
        outputs = self.experts(x.index_select(0, order // self.top_k), experts)
        by_token = torch.empty_like(outputs).index_copy_(0, order, outputs).view(len(x), self.top_k, -1)
        y = by_token.mul_(weights).sum(1)
        if self.shared is not None:
            y.addcmul_(self.shared_gate(x).sigmoid(), self.shared(x))
        return self.tp.all_reduce(y)
