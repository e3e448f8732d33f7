"""Every message that crosses a process border, as one closed set of typed structs.

A request in messages:

    API server --NewRequest--> engine core --Step--> workers --StepResult--> engine core --Outputs--> API server
    API server ===tensors=====================> workers --MediaReady--> engine core

It knows neither sockets nor torch: a `TensorHandle` stands for a tensor, whose bytes travel beside the message. All
structs are immutable; the receiver owns what it gets.
"""

from __future__ import annotations

import msgspec

from mini_engine.messages.handshake import (
    Drain, EngineLimits, Init, MediaCachePlan, PeerGone, RankAddress, Ready, Refused,
    Role, Serving, Start,
)  # fmt: skip
from mini_engine.messages.requests import (
    BindName, ChildRequest, ControlReply, ControlRequest, EngineStats, EngineTimes, Finish, FinishReason,
    Found, FoundMedia, Lookup, MediaMiss, NamedMedia, NewRequest, Outputs, PoolingParams, Problem,
    RequestOutput, Reserve, Reserved, SamplingParams, TokenLogprob, Written,
)  # fmt: skip
from mini_engine.messages.steps import (
    Chunk, EncodeItem, Grammar, GrammarReady, KeepMedia, MediaReady, NewSequence, SampledToken, StateStart,
    Step, StepResult, WorkerReady,
)  # fmt: skip
from mini_engine.messages.tensors import (
    ItemFacts, DeviceSlots, MediaItem, Message, MessageId, Modality, ProbeResult, StoreHandle, TensorHandle,
    TensorMessage, TransportName,
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message on a socket, and its sender."""

    incarnation: int  # of the sender: unique for each start of a process, see `PeerGone`
    body: AnyMessage


AnyMessage = (
    Ready | Refused | Start | Serving | Drain | PeerGone
    | NewRequest | Finish | Outputs | MediaMiss | ControlRequest | ControlReply
    | Lookup | Found | Reserve | Reserved | Written | BindName
    | Step | StepResult | WorkerReady | MediaReady | GrammarReady
    | TensorMessage | ProbeResult
)  # fmt: skip
