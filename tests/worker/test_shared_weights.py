"""Weights of several engines in the same memory: what they compute stays the same."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from mini_engine.matmul.linear import linear
from mini_engine.worker.shared_weights import PAGE, share_weights

SIZE = 1024


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("weights")
    yield fd
    os.close(fd)


def make_weights(seed: int) -> nn.ParameterList:
    """A dense matrix, one in oneDNN's order, and codes. The first and the last begin where a page does, as in a new
    process; pytest's heap has free pieces that begin anywhere."""
    generator = torch.Generator().manual_seed(seed)
    dense, packed = torch.randn(2, SIZE, SIZE, generator=generator).unbind()
    codes = torch.randint(256, (2 * SIZE, SIZE), generator=generator, dtype=torch.uint8)
    dense, codes = (
        torch.frombuffer(mmap.mmap(-1, x.nbytes), dtype=x.dtype).view(x.shape).copy_(x) for x in (dense, codes)
    )
    packed = torch.ops.mkldnn._reorder_linear_weight(packed, 8)
    return nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in (dense, packed, codes))


@pytest.mark.parametrize("written", [b"", b"\1" * SIZE])
def test_engines_with_equal_weights_share_them_and_others_keep_their_own(memory: int, written: bytes) -> None:
    os.write(memory, written)  # by a worker that died
    models, x = [make_weights(1), make_weights(1), make_weights(2)], torch.randn(64, SIZE)
    expected = [(dense.clone(), linear(x, packed), codes.clone()) for dense, packed, codes in models]
    first, second, other = (share_weights(model, memory) for model in models)
    assert first > (4 + 2) * SIZE**2 - 2 * PAGE <= second, "the matrix in oneDNN's order may lie elsewhere in a page"
    assert other == 0
    for (dense, packed, codes), (old_dense, product, old_codes) in zip(models, expected, strict=True):
        assert torch.equal(dense, old_dense) and torch.equal(codes, old_codes)
        assert torch.equal(linear(x, packed), product)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weights" in line]
    mapped = [range(*(int(border, 16) for border in words[0].split("-"))) for words in lines]
    middles = [codes.data_ptr() + codes.nbytes // 2 for _, _, codes in models]
    assert [any(middle in pages for pages in mapped) for middle in middles] == [True, True, False]


def test_a_write_changes_the_weights_of_one_process_alone(memory: int) -> None:
    first, second = make_weights(1), make_weights(1)
    for model in (first, second):
        share_weights(model, memory)
    first[0].zero_()
    assert second[0].any()


def test_weights_that_begin_elsewhere_in_a_page_overwrite_none_that_are_shared(memory: int) -> None:
    models = []
    for begin in (16, 0):  # bytes after a page does
        room = torch.empty(SIZE**2 + PAGE, dtype=torch.int32)
        values = room[(begin - room.data_ptr()) % PAGE // 4 :][: SIZE**2]
        torch.arange(SIZE**2, dtype=torch.int32, out=values)
        models.append(nn.ParameterList([nn.Parameter(values, requires_grad=False)]))
    for model in models:
        share_weights(model, memory)
    assert torch.equal(models[0][0], models[1][0])
