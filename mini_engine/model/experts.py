"""Mixtures of experts: a router chooses for each token a few of many gated MLPs, whose outputs are summed by weight
(Shazeer et al. 2017, with the softmax over the chosen ones). Each rank holds a slice of every expert.

Pairs of a token and one of its experts are sorted by expert, so that an expert's rows lie together. On a CPU each
expert that has rows is two products of its own, and the others are not read. On CUDA all are one product, whose shapes
follow from the number of pairs alone: nothing is read back to the host, and a CUDA graph can hold it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.kernels import ops
from mini_engine.matmul.quantized import QuantizedMatrix, StackedMatrix, multiply_each, triton_matmul
from mini_engine.model.checkpoint import CheckpointError
from mini_engine.model.config import ExpertsConfig
from mini_engine.model.layers import GatedMLP, Layer, WeightSlice, make_matrix, part_of
from mini_engine.model.parallel import Placement

FEW_ROWS = 128  # of an expert, up to which the kernel takes less time on CUDA than torch's product of groups


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

    def forward(self, x: Tensor, pairs: ops.Pairs) -> Tensor:
        """`[n, size]` -> `[pairs, size]`, by their numbers."""
        sizes = pairs.ends.diff(prepend=pairs.ends.new_zeros(1)).tolist()
        layers: list[Any] = [self[expert] for expert, size in enumerate(sizes) if size]
        sizes = [*filter(None, sizes)]
        rows = x.index_select(0, pairs.order // pairs.each).split(sizes)
        # What lies between the products is one operator each for all experts: of a row it takes as long as for one.
        inner = ops.silu_mul(multiply_each(rows, [layer.up.weight for layer in layers]))
        outputs = multiply_each(inner.split(sizes), [layer.down.weight for layer in layers])
        return torch.empty_like(outputs).index_copy_(0, pairs.order.long(), outputs)


class GroupedExperts(Layer):
    """The same as `Experts`, in one product; the matrices of all experts lie below each other."""

    def __init__(self, source: str, size: int, inner: int, count: int, at: Placement) -> None:
        super().__init__()
        if at.device.type == "cuda":
            if at.dtype is torch.float32:
                raise ValueError("experts on CUDA need a 16-bit dtype; set --dtype bfloat16")
            if obstacle := ops.triton_obstacle(at.device):
                raise ValueError(f"experts on CUDA need Triton's kernels: {obstacle}; or set --device cpu")
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
        return matrix

    def forward(self, x: Tensor, pairs: ops.Pairs) -> Tensor:
        """As of `Experts`."""
        order, ends, each = pairs
        if len(order) <= FEW_ROWS * self.count or x.dtype is not torch.bfloat16:
            return self._multiply(x, pairs)
        rows = x.index_select(0, order // each)
        inner = ops.silu_mul(F.grouped_mm(rows, self._dense(self.gate_up), offs=ends))
        outputs = F.grouped_mm(inner, self._dense(self.down), offs=ends)
        return torch.empty_like(outputs).index_copy_(0, order.long(), outputs)

    def _multiply(self, x: Tensor, pairs: ops.Pairs, shape: Any = None) -> Tensor:
        multiply = triton_matmul().multiply
        inner = ops.silu_mul(multiply(x, *_operands(self.gate_up), pairs, gathers=True, shape=shape))
        return multiply(inner, *_operands(self.down), pairs, scatters=True, shape=shape)

    def compile_products(self, each: int, dtype: torch.dtype) -> None:
        """Compile what x of this dtype takes, for any number of rows with `each` experts."""
        x = _operands(self.down)[0].new_zeros(1, self.size, dtype=dtype)
        pairs = ops.sort_pairs(torch.zeros(1, each, dtype=torch.int32, device=x.device), self.count)
        for shape in triton_matmul().SHAPES:
            self._multiply(x, pairs, shape)
        for matrix in (self.gate_up, self.down):
            if isinstance(matrix, QuantizedMatrix):
                matrix.compile_unpacking(dtype)

    def _dense(self, matrix: nn.Parameter | QuantizedMatrix) -> Tensor:
        """`[experts, inputs, outputs]`, a view where the matrix is dense."""
        whole = matrix.dequantize(torch.bfloat16) if isinstance(matrix, QuantizedMatrix) else matrix
        return whole.unflatten(0, (self.count, -1)).mT

    def weight_slices(self) -> Iterator[WeightSlice]:
        whole, widths = slice(0, self.size), {"gate_proj": 0, "up_proj": self.padded}
        for expert in range(self.count):
            source = f"{self.source}.{expert}"
            for name, start in widths.items():
                start += 2 * expert * self.padded
                held = part_of(self.gate_up, slice(start, start + self.held), self.size)
                yield WeightSlice(f"{source}.{name}.weight", (self.inner, self.size), (self.part,), held)
            held = part_of(self.down, slice(expert * self.size, (expert + 1) * self.size), self.held)
            yield WeightSlice(f"{source}.down_proj.weight", (self.size, self.inner), (whole, self.part), held)


def _operands(matrix: nn.Parameter | QuantizedMatrix) -> tuple[Tensor, Tensor | None]:
    return matrix.operands if isinstance(matrix, QuantizedMatrix) else (matrix, None)


class MixtureOfExperts(nn.Module):
    """`sum_i weight_i expert_i(x)` over the experts of the largest scores, and with a shared expert
    `sigmoid(gate x) * shared(x)` (Qwen1.5-MoE) besides.

    Args:
        source: the layer's name in checkpoints.
        inner: inner size of an expert.
    """

    def __init__(self, source: str, size: int, inner: int, config: ExpertsConfig, at: Placement) -> None:
        super().__init__()
        self.top_k, self.count, self.tp = config.top_k, config.count, at.tp
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
        chosen, weights = ops.choose_experts(self.router(x), self.top_k)
        outputs = self.experts(x, ops.sort_pairs(chosen, self.count))
        if self.shared is None:
            return self.tp.all_reduce(ops.sum_experts(outputs, weights))
        return self.tp.all_reduce(ops.sum_experts(outputs, weights, self.shared(x), self.shared_gate(x)))


@torch.inference_mode()
def compile_products(module: nn.Module, dtype: torch.dtype) -> None:
    """Compile what products with quantised matrices and experts below `module` take on CUDA, whatever rows x has."""
    for child in module.children():
        if isinstance(child, QuantizedMatrix):
            child.compile_products(dtype)
        elif isinstance(child, GroupedExperts):
            assert isinstance(module, MixtureOfExperts)
            child.compile_products(module.top_k, dtype)
        else:
            compile_products(child, dtype)
