"""Between the supervisor and its children."""

from typing import Literal

import msgspec

from mini_engine.config import EngineConfig
from mini_engine.messages.tensors import Message

Role = Literal["api", "core", "worker"]


class RankAddress(msgspec.Struct, frozen=True):
    """Where a worker rank receives tensors."""

    engine: int
    rank: int
    tensor_ipc: str  # path of a unix socket in the runtime directory


class MediaCachePlan(msgspec.Struct, frozen=True):
    """Type and size of the media cache."""

    kind: Literal["off", "lru", "shm"]
    nbytes: int  # of each worker (lru), or of each engine's store (shm)
    reason: str


class Init(msgspec.Struct, frozen=True):
    """What a child has from the supervisor's memory: all that it needs to build itself and to find its peers."""

    config: EngineConfig
    model_dir: str  # local directory, resolved by the supervisor
    runtime_dir: str
    cores: list[str]  # ZMQ endpoint for API servers, by engine
    core_workers: list[str]  # ZMQ endpoint for workers, by engine
    ranks: list[RankAddress]  # of all engines
    media_cache: MediaCachePlan
    restarts: int = 0  # of all engines, so far


class EngineLimits(msgspec.Struct, frozen=True):
    """What an engine can hold, known once its workers have loaded."""

    max_model_len: int  # tokens, prompt and output together
    num_blocks: int
    block_size: int  # tokens
    max_prompt_media_tokens: int  # of all media items of one prompt: the encoder cache's budget
    device: str = "cpu"  # of its workers: "cpu" or "cuda"
    num_states: int = 0  # recurrent states, those of running sequences and snapshots; 0: the model has none


class Ready(Message, frozen=True):
    """Child -> supervisor: it can serve. A core sends its limits."""

    limits: EngineLimits | None = None


class Refused(Message, frozen=True):
    """Child -> supervisor, its last message: these settings or files cannot work."""

    reason: str  # for the log: names the setting or file and the remedy


class Start(Message, frozen=True):
    """Supervisor -> API server: every process is ready; serve."""

    limits: EngineLimits


class Drain(Message, frozen=True):
    """Supervisor -> API server that serves: refuse new requests, and exit when the last one is answered."""


class Serving(Message, frozen=True):
    """API server -> supervisor: its socket accepts connections."""


class PeerGone(Message, frozen=True):
    """Supervisor -> child: a process was reaped. All messages of this incarnation are void, later ones too."""

    sender: str
    incarnation: int
