"""Every message survives encoding and decoding; tensors are taken out of band."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, get_args

import msgspec
import pytest
import torch

from mini_engine import messages
from mini_engine.config import EngineConfig
from mini_engine.messages import MediaItem, MessageId, NewRequest, SamplingParams, TensorHandle
from mini_engine.transport.codec import Encoder, decode


def request(*tensors: torch.Tensor) -> NewRequest:
    media = [MediaItem(b"", "image", 1, (1, 2, 2), None, offsets=[0], patches=tensor) for tensor in tensors]
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


SAMPLES = {int: 3, float: 1.5, str: "text", bytes: b"\x00hash", bool: True, Any: 1, type(None): None}


def sample(kind: Any) -> Any:
    """A value of type `kind`, with every field and container filled, so that no default hides a loss."""
    origin, arguments = typing.get_origin(kind), get_args(kind)
    if kind in SAMPLES:
        return SAMPLES[kind]
    if kind is EngineConfig:
        return EngineConfig(max_num_seqs=7)
    if origin is typing.Literal:
        return arguments[-1]
    if origin in (typing.Union, types.UnionType):
        return sample(next(each for each in arguments if each is not type(None)))
    if origin is list:
        return [sample(arguments[0])] * 2
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if origin is tuple:
        return tuple(sample(each) for each in arguments if each is not Ellipsis)
    if dataclasses.is_dataclass(kind):
        return kind()
    return kind(**{field.name: sample(field.type) for field in msgspec.structs.fields(kind)})


@pytest.mark.parametrize("kind", get_args(messages.AnyMessage), ids=lambda kind: kind.__name__)
def test_every_message_round_trips(kind: type[messages.Message]) -> None:
    body = sample(kind)
    envelope = decode(Encoder("api 0", 12).encode(body))
    assert envelope == messages.Envelope("api 0", 12, body)
    assert type(envelope.body) is kind


def test_the_set_of_messages_is_closed() -> None:
    defined = {
        each for each in vars(messages).values() if isinstance(each, type) and issubclass(each, messages.Message)
    }
    assert defined - {messages.Message} == set(get_args(messages.AnyMessage))
