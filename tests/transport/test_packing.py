"""The layout of a message: what goes in comes out, and nothing reads outside of the buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import MessageId, TensorLayout, TensorMessage
from mini_engine.transport.base import TransportError
from mini_engine.transport.packing import ALIGNMENT, DTYPES, Packer, decode_head, unpack

MESSAGE = MessageId(7, 1)


def packed(tensors: list[torch.Tensor], room: int = 1 << 16) -> tuple[Packer, torch.Tensor]:
    memory = torch.zeros(room, dtype=torch.uint8)
    packer = Packer(MESSAGE, memory)
    for tensor in tensors:
        packer(tensor)
    return packer, memory


def test_every_dtype_and_shape_returns() -> None:
    tensors = [torch.ones(3, 5, dtype=dtype) for dtype in DTYPES.values()]
    tensors += [torch.tensor(2.5), torch.empty(0, 4), torch.arange(12).view(3, 4).t()]
    packer, memory = packed(tensors)
    back = unpack(TensorMessage(1, packer.nbytes, packer.layouts), memory)
    for sent, received in zip(tensors, back, strict=True):
        assert received.dtype == sent.dtype and torch.equal(received, sent) and received.is_contiguous()
    assert all(layout.offset % ALIGNMENT == 0 for layout in packer.layouts)
    assert back[0].data_ptr() == memory.data_ptr()  # a view, no copy


def test_a_handle_describes_its_tensor() -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    packer = Packer(MESSAGE, memory)
    packer(torch.zeros(1))
    handle = packer(torch.zeros(2, 3, dtype=torch.int16))
    assert (handle.message, handle.index, handle.shape, handle.dtype) == (MESSAGE, 1, (2, 3), "int16")
    packer.new_message()
    assert packer.nbytes == 0 and packer(torch.zeros(1)).index == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1025, dtype=torch.uint8),
        torch.empty(1, device="meta"),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2).to_sparse(),
        torch.zeros([1] * 9),
    ],
)
def test_what_cannot_be_sent_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(TransportError):
        packed([tensor], room=1024)


def test_only_tensors_are_taken() -> None:
    with pytest.raises(TypeError):
        Packer(MESSAGE, torch.zeros(8, dtype=torch.uint8))([1, 2])


@pytest.mark.parametrize(
    ("nbytes", "layout"),
    [
        (256, TensorLayout(0, (257,), "uint8")),
        (256, TensorLayout(192, (65,), "uint8")),
        (256, TensorLayout(0, (1 << 40, 1 << 40), "uint8")),
        (256, TensorLayout(0, (-1,), "uint8")),
        (256, TensorLayout(-64, (4,), "uint8")),
        (256, TensorLayout(1, (4,), "uint8")),
        (256, TensorLayout(1 << 62, (4,), "uint8")),
        (256, TensorLayout(0, (4,), "uint9")),
        (256, TensorLayout(0, (1,) * 9, "uint8")),
        (256, TensorLayout(0, (0,) + ((1 << 48) - 1,) * 4, "uint8")),
        (64, TensorLayout(64, (64,), "uint8")),
        (257, TensorLayout(0, (4,), "uint8")),
        (-1, TensorLayout(0, (4,), "uint8")),
        (1 << 62, TensorLayout(0, (4,), "uint8")),
    ],
)
def test_a_layout_outside_of_the_buffer_is_refused(nbytes: int, layout: TensorLayout) -> None:
    with pytest.raises(TransportError):
        unpack(TensorMessage(1, nbytes, [layout]), torch.zeros(256, dtype=torch.uint8))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-5, 400),
    st.lists(
        st.builds(
            TensorLayout,
            st.integers(-2, 8).map(lambda n: n * 32),
            st.lists(st.integers(-1, 70), max_size=3).map(tuple),
            st.sampled_from([*DTYPES, "nonsense"]),
        ),
        max_size=3,
    ),
)
def test_no_view_reaches_outside(nbytes: int, layouts: list[TensorLayout]) -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    try:
        tensors = unpack(TensorMessage(1, nbytes, layouts), memory)
    except TransportError:
        return
    for tensor in tensors:
        if tensor.numel():
            start = tensor.data_ptr() - memory.data_ptr()
            assert start >= 0 and start + tensor.nbytes <= nbytes <= 256


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_no_head(garbage: bytes) -> None:
    with pytest.raises(TransportError):
        decode_head(garbage)
