"""Weights of several engines in the same memory: what they compute stays the same."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mini_engine.kernels import onednn
from mini_engine.worker.shared_weights import PAGE, share_weights

SIZE = 1024
PAGES = (4 + 2) * SIZE**2 - 2 * PAGE  # bytes that a model shares, beside the matrix in oneDNN's order


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("weights")
    yield fd
    os.close(fd)


def in_own_pages(values: Tensor) -> Tensor:
    """A copy, as a new process allocates it; pytest's heap has free pieces that begin anywhere."""
    return torch.frombuffer(mmap.mmap(-1, values.nbytes), dtype=values.dtype).view(values.shape).copy_(values)


class Weights(nn.Module):
    """A dense matrix, one in oneDNN's order, and codes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        dense, packed = torch.randn(2, SIZE, SIZE, generator=generator).unbind()
        self.dense = nn.Parameter(in_own_pages(dense), requires_grad=False)
        self.packed = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(packed, 8), requires_grad=False)
        codes = torch.randint(256, (2 * SIZE, SIZE), generator=generator, dtype=torch.uint8)
        self.register_buffer("codes", in_own_pages(codes))
        self.codes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = onednn.multiply(x @ self.dense.T, self.packed, None)
        return y + self.codes.float().sum()


def is_mapped(tensor: Tensor) -> bool:
    """Whether the middle of it lies in a memfd."""
    address = tensor.data_ptr() + tensor.nbytes // 2
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return "memfd:weights" in line
    raise AssertionError


@pytest.mark.parametrize("written", [b"", b"\1" * SIZE])
def test_engines_with_equal_weights_share_them_and_others_keep_their_own(memory: int, written: bytes) -> None:
    os.write(memory, written)  # by a worker that died
    models, x = [Weights(1), Weights(1), Weights(2)], torch.randn(64, SIZE)
    expected = [model(x) for model in models]
    first, second, other = (share_weights(model, memory) for model in models)
    assert first > PAGES <= second and other == 0
    assert [is_mapped(model.codes) for model in models] == [True, True, False]
    assert all(torch.equal(model(x), y) for model, y in zip(models, expected, strict=True))


def test_a_write_changes_the_weights_of_one_process_alone(memory: int) -> None:
    first, second = Weights(1), Weights(1)
    for model in (first, second):
        share_weights(model, memory)
    first.dense.zero_()
    assert second.dense.any()


def test_weights_that_begin_elsewhere_in_a_page_overwrite_none_that_are_shared(memory: int) -> None:
    models = [nn.ParameterList([placed(begin)]) for begin in (16, 0)]
    for model in models:
        share_weights(model, memory)
    assert torch.equal(models[0][0], models[1][0])


def placed(begin: int) -> nn.Parameter:
    """Weights that begin so many bytes after a page does."""
    room = torch.empty(SIZE**2 + PAGE, dtype=torch.int32)
    weights = room[(begin - room.data_ptr()) % PAGE // 4 :][: SIZE**2]
    return nn.Parameter(torch.arange(SIZE**2, dtype=torch.int32, out=weights), requires_grad=False)
