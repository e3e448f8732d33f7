"""The layers that decoder and vision tower are made of, each holding one rank's part of its weights.

A layer says by `weight_slices` which rectangle of which checkpoint tensor it holds; `weights.py` does the reading.
Checkpoint names are in the newer hub layout (`model.language_model.*`, `model.visual.*`, `lm_head.weight`).
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.free_memory import return_freed_memory
from mini_engine.kernels import ops
from mini_engine.matmul import in_float32
from mini_engine.matmul.in_float32 import HalfMatrix
from mini_engine.matmul.linear import linear, pack
from mini_engine.matmul.quantized import (
    GROUPS,
    Int4Matrix,
    Int8Matrix,
    MatrixPart,
    QuantizedMatrix,
    StackedMatrix,
    has_vnni,
)
from mini_engine.model.checkpoint import CheckpointError, Progress
from mini_engine.model.parallel import Placement, TensorParallel

logger = logging.getLogger(__name__)

MadeMatrix = nn.Parameter | QuantizedMatrix | StackedMatrix
Matrix = MadeMatrix | HalfMatrix

TRIM_MODULES = 200  # are packed before memory is returned, which takes milliseconds
TRIM_BYTES = 128 << 20  # of parts, likewise: no other fits where one lay; and what steps have freed goes, too


@dataclass(frozen=True)
class WeightSlice:
    """One rectangle of one checkpoint tensor and the memory on this rank that it fills."""

    source: str
    shape: tuple[int, ...]  # of the whole checkpoint tensor
    index: tuple[slice, ...]  # this rank's part of it, leading axes
    target: Tensor | MatrixPart  # a view of the parameter, shaped like the part
    twin: str | None = None  # another tensor that is this one again: where it is stored at all, it must be the same


@dataclass(frozen=True)
class Rows:
    """Rows `part` of the `total` rows of the checkpoint tensor `source`; zeros follow them, up to `padded` rows."""

    source: str
    total: int
    part: slice
    padded: int = 0

    @property
    def count(self) -> int:
        return self.part.stop - self.part.start


class Layer(nn.Module):
    """A module with its own weights: by default the checkpoint's tensors below `source`, whole on every rank."""

    source: str

    def weight_slices(self) -> Iterator[WeightSlice]:
        """The parts of a checkpoint that this layer loads. Targets are views: repeat the call after `.to()`."""
        for name, target in self.named_parameters():
            yield WeightSlice(f"{self.source}.{name}", tuple(target.shape), (slice(0, len(target)),), target)


def weight_slices_of(module: nn.Module) -> Iterator[WeightSlice]:
    """Those of all layers below `module`, itself included."""
    for layer in module.modules():
        if isinstance(layer, Layer):
            yield from layer.weight_slices()


def pack_weights(module: nn.Module) -> None:
    """Replace the matrices below `module` by copies in the order that products read fastest, where there is one; see
    `linear.pack`. They are opaque, so no weights can be loaded afterwards. What `pack_later` is for stays as it is."""
    layers = [layer for layer in module.modules() if isinstance(layer, ColumnParallel | RowParallel)]
    heads = [layer for layer in module.modules() if isinstance(layer, VocabParallelEmbedding) and layer.is_head]
    # oneDNN's order has no rows, which `project_to` reads.
    packed_heads = [head for head in heads if isinstance(head.weight, nn.Parameter) and in_float32.widens(head.weight)]
    for number, layer in enumerate((*layers, *packed_heads)):
        if isinstance(layer.weight, nn.Parameter):
            packed = pack(layer.weight)
            del layer.weight  # a parameter, which a module does not replace
            layer.weight = packed
            _trim(number)
    return_freed_memory()
    for number, matrix in enumerate(m for m in module.modules() if isinstance(m, QuantizedMatrix)):
        matrix.pack()
        _trim(number)


def pack_later(module: nn.Module) -> Iterator[None]:
    """Pack each `HalfMatrix` below `module`. Before each item of the iterator, as many parts are packed at a time as
    products have threads; between two items the model may be used."""
    matrices = [matrix for matrix in module.modules() if isinstance(matrix, HalfMatrix)]
    parts = [(matrix, number) for matrix in matrices for number in range(matrix.num_parts)]
    threads, freed = torch.get_num_threads(), 0
    if matrices:
        is_quantised = any(isinstance(below, QuantizedMatrix) for below in module.modules())
        remedy = "" if is_quantised or not has_vnni() else "; --quantization int8 is faster here"
        reason = "this CPU has no instructions for bfloat16"
        logger.info("%s: packing weights between steps, which are slow until that ends%s", reason, remedy)
    progress = Progress("weights packed", 2 * sum(math.prod(matrix.shape) for matrix in matrices))
    with single_threads(threads) as pool:
        for first in range(0, len(parts), threads):
            for nbytes in pool.map(HalfMatrix.pack, *zip(*parts[first : first + threads], strict=True)):
                progress.add(nbytes)
                freed += nbytes
            if freed >= TRIM_BYTES:
                return_freed_memory()
                freed = 0
            yield
    return_freed_memory()


@contextlib.contextmanager
def single_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that torch may be used in: each would otherwise start as many of OpenMP's."""
    of_others = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(of_others)  # of threads that torch meets later; this one has kept its own


def _trim(number: int) -> None:
    """Small matrices fragment the heap: a third of it was free and not returned."""
    if number % TRIM_MODULES == 0:
        return_freed_memory()


def make_matrix(sources: Sequence[tuple[str, int]], inputs: int, part: slice, width: int, at: Placement) -> MadeMatrix:
    """The matrices of these names and numbers of outputs below each other, held as `at.quantization` says: dense ones
    as `Placement.empty` makes them, quantised ones zero.

    Args:
        inputs: length of a row over all ranks.
        part: the part of it that this rank holds.
        width: the length of a row here, at least that of the part.
    """
    made: list[nn.Parameter | QuantizedMatrix] = []
    for bits, run in groupby(sources, lambda pair: at.quantization.kind(pair[0]).bits):
        names, counts = zip(*run, strict=True)
        outputs = sum(counts)
        if bits == 4:
            stored = [at.quantization.kind(name).group or inputs for name in names]
            group = _group(names[0], math.gcd(*stored), inputs, part, width, at)
            made.append(Int4Matrix(outputs, width, group, at.dtype, at.device))
        else:
            made.append(Int8Matrix(outputs, width, at.device) if bits == 8 else at.empty(outputs, width))
    return made[0] if len(made) == 1 else StackedMatrix(made)


def _group(name: str, stored: int, inputs: int, part: slice, width: int, at: Placement) -> int:
    """The largest number of inputs that may share a scale, given that `stored` share one in the files: the borders of
    theirs and of the rank's part are borders. Raises CheckpointError: there is none."""
    common = math.gcd(stored, part.start, part.stop - part.start, width)
    if group := next((group for group in GROUPS if common % group == 0), 0):
        return group
    smallest = GROUPS[-1]
    # A divisor of the number of workers, since it divides the heads as well.
    sizes = [size for size in range(1, at.tp.size) if at.tp.size % size == inputs % size == 0]
    fitting = [size for size in sizes if math.gcd(stored, inputs // size) % smallest == 0]
    remedy = (
        f"set --tensor-parallel-size {fitting[-1]}" if fitting else "choose --quantization int8 or a dense checkpoint"
    )
    raise CheckpointError(
        f"{name}: rows of {inputs} weights cannot be cut for {at.tp.size} worker(s) into groups of {smallest} or more, "
        f"which torch's 4-bit products need; {remedy}"
    )


def part_of(matrix: Matrix, rows: slice, width: int) -> Tensor | MatrixPart:
    """The first columns of some rows, to be filled; of a stacked matrix the rows are of one kind."""
    if isinstance(matrix, StackedMatrix):
        for below in matrix.matrices:
            if rows.start < below.shape[0]:
                return part_of(below, rows, width)
            rows = slice(rows.start - below.shape[0], rows.stop - below.shape[0])
    if isinstance(matrix, QuantizedMatrix):
        return MatrixPart(matrix, rows)
    assert isinstance(matrix, Tensor)
    return matrix[rows, :width]


class RMSNorm(Layer):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang and Sennrich 2019). Replicated. With `offset` the
    parameter is the weight minus 1."""

    def __init__(self, source: str, size: int, eps: float, at: Placement, offset: bool = False) -> None:
        super().__init__()
        self.source, self.eps, self.offset = source, eps, offset
        self.weight = at.empty(size)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.offset)

    def after_add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Add `residual`, if any, to x, in place; the norm of the sum."""
        return self(x) if residual is None else ops.add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class LayerNorm(Layer):
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last axis (Ba et al. 2016). Replicated."""

    def __init__(self, source: str, size: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.source, self.eps = source, eps
        self.weight, self.bias = at.empty(size), at.empty(size)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `residual` to x, in place; the norm of the sum."""
        return self(x.add_(residual))


class ColumnParallel(Layer):
    """`y = x W^T + b` with the rows of W split over the ranks; several checkpoint matrices merged into one product.

    Args:
        inputs: length of x's last axis, whole on every rank.
        rows: what this rank computes, in the order of y's last axis.
    """

    def __init__(self, inputs: int, rows: Sequence[Rows], bias: bool, at: Placement) -> None:
        super().__init__()
        self.rows = tuple(rows)
        outputs = sum(max(r.count, r.padded) for r in self.rows)
        self.inputs = inputs
        sources = [(r.source, max(r.count, r.padded)) for r in self.rows]
        self.weight: Matrix = make_matrix(sources, inputs, slice(0, inputs), inputs, at)
        self.bias = at.empty(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` -> `[..., this rank's outputs]`."""
        return linear(x, self.weight, self.bias)

    def weight_slices(self) -> Iterator[WeightSlice]:
        start = 0
        for r in self.rows:
            here = slice(start, start + r.count)
            shape = (r.total, self.inputs)
            yield WeightSlice(f"{r.source}.weight", shape, (r.part,), part_of(self.weight, here, self.inputs))
            if self.bias is not None:
                yield WeightSlice(f"{r.source}.bias", (r.total,), (r.part,), self.bias[here])
            start += max(r.count, r.padded)


class RowParallel(Layer):
    """`y = x W^T + b` with the columns of W split over the ranks, summed over them; b is replicated.

    Args:
        inputs: length of x's last axis over all ranks.
        part: the part of it that this rank's x holds.
        padded: length of this rank's x, if that is more; the rest of it counts for nothing.
        is_summed: whether y is; otherwise it is this rank's term of the sum, without a bias.
    """

    def __init__(
        self, source: str, inputs: int, part: slice, outputs: int, bias: bool, at: Placement, padded: int = 0,
        is_summed: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.source, self.inputs, self.part = source, inputs, part
        self.tp = at.tp if is_summed else TensorParallel()
        self.held = part.stop - part.start
        self.outputs = outputs
        self.weight: Matrix = make_matrix([(source, outputs)], inputs, part, max(self.held, padded), at)
        self.bias = at.empty(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., this rank's part]` -> `[..., outputs]`, the same on every rank."""
        if self.tp.size == 1:
            return linear(x, self.weight, self.bias)
        y = self.tp.all_reduce(linear(x, self.weight))
        # Added once, after the sum: inside the product it would count once per rank.
        return y if self.bias is None else y + self.bias

    def weight_slices(self) -> Iterator[WeightSlice]:
        rows = slice(0, self.outputs)
        held = part_of(self.weight, rows, self.held)
        yield WeightSlice(f"{self.source}.weight", (self.outputs, self.inputs), (rows, self.part), held)
        if self.bias is not None:
            yield WeightSlice(f"{self.source}.bias", (self.outputs,), (rows,), self.bias)


class MLP(nn.Module):
    """`down(activation(up x))`, up split by column, down by row.

    The rank's inner size is padded, see `Placement.padded`, with zeros.

    Args:
        up: checkpoint names of the matrices whose products lie side by side.
        down: that of the other matrix.
        sizes: of x, of each product in between, and of the result.
        activation: of these products; 0 where they are 0.
        is_summed: as of `RowParallel`.
    """

    def __init__(
        self, up: Sequence[str], down: str, sizes: tuple[int, int, int], activation: Callable[[Tensor], Tensor],
        bias: bool, at: Placement, is_summed: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        size, inner, outputs = sizes
        part = at.tp.part(inner)
        self.activation = activation
        padded = at.padded(part.stop - part.start)
        self.up = ColumnParallel(size, [Rows(name, inner, part, padded) for name in up], bias, at)
        self.down = RowParallel(down, inner, part, outputs, bias, at, padded, is_summed)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedMLP(MLP):
    """`down(silu(gate x) * up x)` (SwiGLU, Shazeer 2020)."""

    def __init__(self, source: str, size: int, inner: int, bias: bool, at: Placement, is_summed: bool = True) -> None:
        up = [f"{source}.{name}" for name in ("gate_proj", "up_proj")]
        super().__init__(up, f"{source}.down_proj", (size, inner, size), ops.silu_mul, bias, at, is_summed)


class VocabParallelEmbedding(Layer):
    """A row for each token, split over the ranks: the token table, or the output head, or both where they are tied.

    Args:
        source, twin: checkpoint names; see `WeightSlice`.
        is_head: it is no token table; as a head alone it may be quantised or packed.
    """

    def __init__(
        self, source: str, vocab_size: int, size: int, at: Placement, twin: str | None = None, is_head: bool = False
    ) -> None:
        super().__init__()
        self.source, self.twin, self.vocab_size, self.size, self.tp = source, twin, vocab_size, size, at.tp
        self.is_head = is_head
        self.part = at.tp.part(vocab_size)
        count, whole = self.part.stop - self.part.start, slice(0, size)
        self.weight: Matrix = (
            make_matrix([(source, count)], size, whole, size, at) if is_head else at.empty(count, size)
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        """int `[n]` -> `[n, size]`, the same on every rank."""
        assert isinstance(self.weight, nn.Parameter)
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.part.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(-1), 0))

    def project(self, x: Tensor) -> Tensor | None:
        """`[n, size]` -> scores `[n, vocab_size]` on rank 0; None on the others."""
        local, size = linear(x, self.weight), self.tp.size
        if size == 1:
            return local
        # Shares differ by a row where the vocabulary does not divide, and the collective wants equal shapes.
        widest = -(-self.vocab_size // size)
        gathered = self.tp.gather(F.pad(local, (0, widest - local.shape[-1])))
        if gathered is None:
            return None
        ends = pairwise(self.vocab_size * rank // size for rank in range(size + 1))
        return torch.cat([part[:, : end - start] for part, (start, end) in zip(gathered, ends, strict=True)], dim=-1)

    def project_to(self, x: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
        """See `VisionLanguageModel.logits_of`."""
        if isinstance(self.weight, nn.Parameter):
            # Few rows of the head, in float32: bfloat16 would round a difference of two logits to an eighth.
            return (x[rows].float() * self(token_ids).float()).sum(-1)
        chosen = x[rows]
        scores = self.project(chosen.float() if isinstance(self.weight, HalfMatrix) else chosen)  # of x's dtype
        return x.new_zeros(len(rows)).float() if scores is None else scores.gather(1, token_ids[:, None])[:, 0].float()

    def weight_slices(self) -> Iterator[WeightSlice]:
        shape, twin = (self.vocab_size, self.size), self.twin and f"{self.twin}.weight"
        held = part_of(self.weight, slice(0, self.part.stop - self.part.start), self.size)
        yield WeightSlice(f"{self.source}.weight", shape, (self.part,), held, twin)
