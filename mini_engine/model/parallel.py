"""Tensor parallelism as an argument: the collectives of the ranks, and which rank holds which part.

`TensorParallel()` is one rank alone, for which every collective does nothing. The caller owns the process group.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mini_engine.model.quantization import Quantization

# Of what the length of a rank's part of an inner axis is made a multiple, by the device's type. CUDA's fastest matrix
# kernels want rows that begin at multiples of 16 bytes; a Qwen2.5-VL's tower has an inner size of 3,420.
GRANULES = {"cuda": 64}

# torch 2.14 deprecates the second name; torch 2.11 lacks the first.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives:
    """Collective operations, here those of torch's default process group. All ranks call the same methods in the same
    order, with contiguous tensors of equal shape and dtype. A rank that is alone needs none."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        dist.all_reduce(tensor)

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        """Fill `gathered`, `[size, ...]`, with each rank's `tensor`, `[...]`."""
        _all_gather(gathered.flatten(0, 1), tensor)

    def gather(self, gathered: Tensor | None, tensor: Tensor) -> None:
        """As `all_gather`, on rank 0 alone: the others pass None."""
        dist.gather(tensor, None if gathered is None else list(gathered))

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with rank 0's."""
        dist.broadcast(tensor, 0)


@dataclass(frozen=True)
class TensorParallel:
    """A rank's place in its group. Collectives raise a RuntimeError if another rank does not join them."""

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=Collectives)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place where there is more than one; returns its argument."""
        if self.size > 1:
            self.collectives.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """`[...]` on each rank -> `[size, ...]` on all, in the order of the ranks. Shapes must be equal."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self.collectives.all_gather(gathered, tensor.contiguous())
        return gathered

    def gather(self, tensor: Tensor) -> Tensor | None:
        """`all_gather` to rank 0; None on the others."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self.size, *tensor.shape) if self.rank == 0 else None
        self.collectives.gather(gathered, tensor.contiguous())
        return gathered

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's, in place; returns its argument."""
        if self.size > 1:
            self.collectives.broadcast(tensor)
        return tensor

    def part(self, total: int) -> slice:
        """This rank's share of `total` rows; shares differ by at most one."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def kv_heads(self, total: int) -> slice:
        """This rank's key-value heads out of `total`; one, shared with its neighbours, where ranks outnumber heads."""
        if self.size <= total:
            return self.part(total)
        first = total * self.rank // self.size
        return slice(first, first + 1)


@dataclass(frozen=True)
class Placement:
    """Where parameters are made: in which group, dtype and device. With `spread_tower` each rank of the group holds the
    whole vision tower and encodes some of the media; otherwise its part of the tower. `quantization` is of
    matrices, which `layers.make_matrix` makes."""

    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    spread_tower: bool = False
    quantization: Quantization = Quantization()

    def alone(self) -> "Placement":
        """The same for what each rank holds whole."""
        return replace(self, tp=TensorParallel())

    def padded(self, size: int) -> int:
        """The length at which a part of `size` of an inner axis is made: what is added stays zero."""
        granule = GRANULES.get(self.device.type, 1)
        return -(-size // granule) * granule

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """A parameter without a gradient. Its contents are unset, or zeros where parts are padded."""
        make = torch.zeros if self.device.type in GRANULES else torch.empty
        return torch.nn.Parameter(make(shape, dtype=self.dtype, device=self.device), requires_grad=False)
