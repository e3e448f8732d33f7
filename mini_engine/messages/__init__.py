"""Every message that crosses a process border, as one closed set of typed structs.

A request in messages:

    API server --NewRequest--> engine core --Step--> workers --StepResult--> engine core --Outputs--> API server
    API server ===tensors=====================> workers --MediaReady--> engine core --Consumed--> API server

This file knows nothing of sockets, tensors or torch: a tensor field travels as a `TensorHandle` (the codec makes the
exchange), its bytes travel beside it. All structs are immutable; the receiver owns what it gets.
"""

from __future__ import annotations

import msgspec

from mini_engine.messages.base import Message
from mini_engine.messages.handshake import (
    PROTOCOL_VERSION, Drain, EngineLimits, Hello, Init, MediaCachePlan, PeerGone, RankAddress, Ready, Refused,
    Role, Serving, Start, TransportChoice,
)  # fmt: skip
from mini_engine.messages.requests import (
    Abandoned, Accepted, AskFigures, CachedMedia, CachesReset, Consumed, EngineCounters, EngineStats,
    EngineTimes, Figures, Finish, FinishReason, Found, Lookup, MediaMiss, NewRequest, Outputs, Ping, Pong,
    RequestOutput, Reserve, Reserved, ResetCaches, SamplingParams, Sibling, TokenLogprob, Unreserve, Written,
)  # fmt: skip
from mini_engine.messages.steps import (
    Chunk, EncodeItem, KeepMedia, MediaFailed, MediaReady, NewSequence, SampledToken, Step, StepResult,
    WorkerReady,
)  # fmt: skip
from mini_engine.messages.tensors import (
    DeviceSlots, MediaItem, MessageId, Modality, ProbeResult, StoreHandle, TensorHandle, TensorMessage,
    TransportName,
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What a socket carries: a message and who sent it.

    `incarnation` is unique for each process start; what an incarnation sent is void once
    `PeerGone(incarnation)` was received, even if it arrives later.
    """

    sender: str  # "api 0", "core 0", "worker 0.1", "supervisor"
    incarnation: int
    body: AnyMessage


AnyMessage = (
    Hello | Init | Ready | Refused | Start | Serving | Drain | PeerGone
    | NewRequest | Finish | ResetCaches | Outputs | Consumed | CachesReset | Ping | Pong
    | Accepted | MediaMiss | AskFigures | Figures
    | Lookup | Found | Reserve | Reserved | Written | Abandoned | Unreserve
    | Step | StepResult | WorkerReady | MediaReady | MediaFailed
    | TensorMessage | ProbeResult | DeviceSlots
)  # fmt: skip
