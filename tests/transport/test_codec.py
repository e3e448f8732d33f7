"""Every message survives encoding and decoding."""

import dataclasses
import types
import typing
from typing import Any, get_args

import msgspec
import pytest

from mini_engine import messages
from mini_engine.config import EngineConfig
from mini_engine.transport.codec import Encoder, decode


@pytest.mark.parametrize("kind", get_args(messages.AnyMessage), ids=lambda kind: kind.__name__)
def test_every_message_round_trips(kind: type[messages.Message]) -> None:
    samples = {int: 3, float: 1.5, str: "text", bytes: b"\x00hash", bool: True, Any: 1, type(None): None}
    samples[EngineConfig] = EngineConfig(max_num_seqs=7)

    def sample(kind: Any) -> Any:
        """A value of type `kind`, with every field and container filled, so that no default hides a loss."""
        origin, arguments = typing.get_origin(kind), get_args(kind)
        if kind in samples:
            return samples[kind]
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

    body = sample(kind)
    envelope = decode(Encoder("api 0", 12).encode(body))
    assert envelope == messages.Envelope(12, body)
    assert type(envelope.body) is kind


def test_the_set_of_messages_is_closed() -> None:
    defined = {
        each for each in vars(messages).values() if isinstance(each, type) and issubclass(each, messages.Message)
    }
    assert defined - {messages.Message} == set(get_args(messages.AnyMessage))
