"""The codec takes tensors out of band."""

from __future__ import annotations

import pytest
import torch

from mini_engine.messages import MediaItem, MessageId, NewRequest, SamplingParams, TensorHandle
from mini_engine.transport.codec import Encoder, decode


def request(*tensors: torch.Tensor) -> NewRequest:
    media = [MediaItem("image", [0], 1, (1, 2, 2), None, tensor, b"") for tensor in tensors]
    return NewRequest("r", [1, 2], SamplingParams(4, 1), media)


class Consumer:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> TensorHandle:
        self.tensors.append(tensor)
        return TensorHandle(MessageId(3, len(self.tensors)), tuple(tensor.shape), str(tensor.dtype)[6:])


def test_tensors_become_handles_in_order() -> None:
    frame = Encoder("api 0", 3).encode(request(torch.zeros(4, 2), torch.ones(3, dtype=torch.uint8)), Consumer())
    envelope = decode(frame)
    assert (envelope.sender, envelope.incarnation) == ("api 0", 3)
    assert [item.patches for item in envelope.body.media] == [
        TensorHandle(MessageId(3, 1), (4, 2), "float32"),
        TensorHandle(MessageId(3, 2), (3,), "uint8"),
    ]
    assert decode(Encoder("core 0", 4).encode(envelope.body)).body == envelope.body  # a handle travels on as it is


def test_without_a_consumer_a_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="Tensor is unsupported"):
        Encoder("api 0", 3).encode(request(torch.zeros(1)))
