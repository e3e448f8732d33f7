"""Every message that crosses a process border, as one closed set of typed structs.

The road of a request in messages:

    API server --NewRequest--> engine core --Step--> workers --StepResult--> engine core --Outputs--> API server
    API server ===tensors=====================> workers --MediaReady--> engine core --Consumed--> API server

This file knows nothing of sockets, tensors or torch: a tensor field travels as a `TensorHandle` (the codec makes the
exchange), its bytes take another road. All structs are immutable; whoever receives one owns it.
"""

from __future__ import annotations

import msgspec

from mini_engine.messages.base import Message
from mini_engine.messages.handshake import (
    PROTOCOL_VERSION,
    Drain,
    EngineLimits,
    Hello,
    Init,
    MediaCachePlan,
    PeerGone,
    RankAddress,
    Ready,
    Refused,
    Role,
    Serving,
    Start,
    TransportChoice,
)
from mini_engine.messages.requests import (
    Abandoned,
    Accepted,
    AskFigures,
    CachedMedia,
    CachesReset,
    Consumed,
    EngineCounters,
    EngineStats,
    EngineTimes,
    Figures,
    Finish,
    FinishReason,
    Found,
    Lookup,
    MediaMiss,
    NewRequest,
    Outputs,
    Ping,
    Pong,
    RequestOutput,
    Reserve,
    Reserved,
    ResetCaches,
    SamplingParams,
    Sibling,
    TokenLogprob,
    Unreserve,
    Written,
)
from mini_engine.messages.steps import (
    Chunk,
    EncodeItem,
    KeepMedia,
    MediaFailed,
    MediaReady,
    NewSequence,
    SampledToken,
    Step,
    StepResult,
    WorkerReady,
)
from mini_engine.messages.tensors import (
    DeviceSlots,
    MediaItem,
    MessageId,
    Modality,
    ProbeResult,
    StoreHandle,
    TensorHandle,
    TensorMessage,
    TransportName,
)

__all__ = [
    "Abandoned",
    "Accepted",
    "AnyMessage",
    "AskFigures",
    "CachedMedia",
    "CachesReset",
    "Chunk",
    "Consumed",
    "DeviceSlots",
    "Drain",
    "EncodeItem",
    "EngineCounters",
    "EngineLimits",
    "EngineStats",
    "EngineTimes",
    "Envelope",
    "Figures",
    "Finish",
    "FinishReason",
    "Found",
    "Hello",
    "Init",
    "KeepMedia",
    "Lookup",
    "MediaCachePlan",
    "MediaFailed",
    "MediaItem",
    "MediaMiss",
    "MediaReady",
    "Message",
    "MessageId",
    "Modality",
    "NewRequest",
    "NewSequence",
    "Outputs",
    "PROTOCOL_VERSION",
    "PeerGone",
    "Ping",
    "Pong",
    "ProbeResult",
    "RankAddress",
    "Ready",
    "Refused",
    "RequestOutput",
    "Reserve",
    "Reserved",
    "ResetCaches",
    "Role",
    "SampledToken",
    "SamplingParams",
    "Serving",
    "Sibling",
    "Start",
    "Step",
    "StepResult",
    "StoreHandle",
    "TensorHandle",
    "TensorMessage",
    "TokenLogprob",
    "TransportChoice",
    "TransportName",
    "Unreserve",
    "WorkerReady",
    "Written",
]


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
