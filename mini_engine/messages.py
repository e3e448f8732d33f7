"""Every message that crosses a process border, as one closed set of typed structs.

The road of a request in messages:

    API server --NewRequest--> engine core --Step--> workers --StepResult--> engine core --Outputs--> API server
    API server ===tensors=====================> workers --MediaReady--> engine core --Consumed--> API server

This file knows nothing of sockets, tensors or torch: a tensor field travels as a `TensorHandle` (the codec makes the
exchange), its bytes take another road. All structs are immutable; whoever receives one owns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from mini_engine.config import EngineConfig

PROTOCOL_VERSION = 1

Role = Literal["api", "core", "worker"]
Modality = Literal["image", "video"]
FinishReason = Literal["stop", "length", "abort", "error"]
TransportName = Literal["torch_shm", "direct_rpc"]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all that may stand in an `Envelope`. The tag on the wire is the class name."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What a socket carries: a message and who sent it.

    `incarnation` is unique for each process start; what an incarnation sent is void once
    `PeerGone(incarnation)` was received, even if it arrives later.
    """

    sender: str  # "api 0", "core 0", "worker 0.1", "supervisor"
    incarnation: int
    body: AnyMessage


# --- tensors ---------------------------------------------------------------------------------------------------------


class MessageId(msgspec.Struct, frozen=True, array_like=True):
    """One tensor message of one sender. `number` counts up from 1 within an incarnation."""

    incarnation: int
    number: int


class TensorHandle(msgspec.Struct, frozen=True, array_like=True):
    """Stands for a tensor that travels out of band: the `index`-th tensor of tensor message `message`."""

    message: MessageId
    index: int
    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: "uint8"


if TYPE_CHECKING:  # the sender puts a torch.Tensor, the codec exchanges it for its handle
    Tensor = Any
else:
    Tensor = TensorHandle


class MediaItem(msgspec.Struct, frozen=True):
    """One image or video of a prompt, as the vision tower needs it."""

    modality: Modality
    offset: int  # index of its first placeholder in the prompt's token ids
    num_tokens: int  # placeholders, that is merged patches: t * h * w / merge_size**2
    grid_thw: tuple[int, int, int]  # patches: frames / temporal_patch_size, height / patch_size, width / patch_size
    second_per_grid: float | None  # seconds between temporal patches; None for an image
    patches: Tensor  # uint8 [t * h * w, 3 * temporal_patch_size * patch_size**2], neither rescaled nor normalised
    # 16 bytes over the media's own bytes, the sampling, the processor's settings and the model: equal hashes, equal
    # patches. Empty: the item is like no other.
    media_hash: bytes = b""


# --- handshake: supervisor and its children --------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Child -> supervisor: I run; tell me who I am to be."""

    role: Role
    index: str  # "0", or "engine.rank" for a worker
    protocol_version: int = PROTOCOL_VERSION


class RankAddress(msgspec.Struct, frozen=True):
    """Where one worker rank receives tensors: two unix sockets in the runtime directory."""

    engine: int
    rank: int
    tensor_ipc: str  # path of the unix socket of the tensor queue
    direct_rpc: str  # ZMQ endpoint


class Init(Message, frozen=True):
    """Supervisor -> child: all that it needs to build itself and to find its peers."""

    config: EngineConfig
    model_dir: str  # local directory, resolved by the supervisor
    runtime_dir: str
    cores: list[str]  # ZMQ endpoint for API servers, by engine
    core_workers: list[str]  # ZMQ endpoint for workers, by engine
    ranks: list[RankAddress]  # all ranks of all engines


class TransportChoice(msgspec.Struct, frozen=True):
    """Which transport an API server uses towards one engine, and why."""

    engine: int
    transport: TransportName
    reason: str


class EngineLimits(msgspec.Struct, frozen=True):
    """What an engine can hold, known once its workers have loaded."""

    max_model_len: int  # tokens, prompt and output together
    num_blocks: int
    block_size: int  # tokens
    max_prompt_media_tokens: int  # most tokens of all media items of one prompt: the encoder cache's budget


class Ready(Message, frozen=True):
    """Child -> supervisor: I can serve. A core gives its limits, an API server its transports."""

    limits: EngineLimits | None = None
    transports: list[TransportChoice] = []


class Start(Message, frozen=True):
    """Supervisor -> API server: every process is ready; serve."""

    limits: EngineLimits


class Serving(Message, frozen=True):
    """API server -> supervisor: my socket accepts connections."""


class PeerGone(Message, frozen=True):
    """Supervisor -> child: a process has been reaped. What it sent and still sends is void."""

    sender: str
    incarnation: int


# --- API server <-> engine core --------------------------------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens; every default of the model and the server is resolved already."""

    max_tokens: int
    seed: int  # 64 bit; drawn by the API server when the request gives none
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off; counts tokens of the prompt and of the output
    presence_penalty: float = 0.0  # counts tokens of the output, as the next
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: list[int] = []  # the model's end-of-sequence tokens among them, unless they are to be ignored
    min_tokens: int = 0  # no stop token is sampled before there are this many
    logprobs: int | None = None  # give the logarithm of each sampled token's probability, and of this many likeliest


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """A further sample (`n` > 1) of a request: everything is the request's but the id and the seed."""

    request_id: str
    seed: int


class NewRequest(Message, frozen=True):
    """API server -> core. Its tensors were sent before it, straight to the ranks."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    media: list[MediaItem] = []
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # prefix-cache blocks are shared only within one salt
    siblings: list[Sibling] = []  # each ends in a finish message of its own


class Finish(Message, frozen=True):
    """API server -> core: end this request now: a stop string was found, or its client is gone.

    An id that is not running (any more) is ignored: the first terminal event has won.
    """

    request_id: str
    reason: FinishReason


class ResetCaches(Message, frozen=True):
    """API server -> core: forget every prefix and every encoded item that no running request uses."""

    number: int  # comes back in `CachesReset`


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of a token's probability before temperature, penalties and filters."""

    token_id: int
    logprob: float


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. The one with a `finish_reason` is the last, and there is exactly one."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None  # with "error": what a client may read
    logprobs: list[
        list[TokenLogprob]
    ] = []  # one for each of `token_ids` if asked for: the token itself, then the likeliest
    num_cached_tokens: int = 0  # with the first tokens: how many of the prompt's tokens the prefix cache held


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges of one engine core at the moment of sending."""

    running: int
    waiting: int
    kv_blocks_used: int  # held by requests; cached blocks that nobody holds are free
    kv_blocks_total: int
    encoder_cache_tokens: int = 0


class EngineCounters(msgspec.Struct, frozen=True, array_like=True):
    """What has happened in an engine core since it last told; each event is told to one API server only."""

    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    encoder_cache_queries: int = 0  # media items needed
    encoder_cache_hits: int = 0  # media items found encoded, or on the way to be
    preemptions: int = 0


class Outputs(Message, frozen=True):
    """Core -> API server: what one retired step brought for its requests, and the engine's figures."""

    outputs: list[RequestOutput]
    stats: EngineStats
    counters: EngineCounters = EngineCounters()


class CachesReset(Message, frozen=True):
    """Core -> API server: `ResetCaches(number)` is done."""

    number: int


class Consumed(Message, frozen=True):
    """Core -> API server: no rank will read these tensor messages again; their memory is the sender's once more."""

    messages: list[MessageId]


# --- engine core <-> workers -----------------------------------------------------------------------------------------


class NewSequence(msgspec.Struct, frozen=True):
    """What the workers keep of a request until `Step.finished` names it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    media: list[MediaItem]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start .. start + num_tokens` of a sequence, to be computed in this step.

    Tokens past the prompt are those the ranks sampled themselves: the core does not send them back.
    """

    request_id: str
    start: int
    num_tokens: int
    block_ids: list[int]  # blocks added to the sequence's table by this step
    samples: bool  # True when the chunk reaches the last known token: sample the next one
    restart: bool = False  # the table begins anew, with `block_ids`; tokens before `start` are in them already


class EncodeItem(msgspec.Struct, frozen=True, array_like=True):
    """Run the vision tower on temporal grids `first .. first + count` of media item `index` of a sequence.

    No attention crosses temporal grids, so a long video may be encoded over several steps: in order, each grid once.
    The embeddings stay in the rank's encoder cache, for every sequence with an item of that hash, until `Step.evict`.
    """

    request_id: str
    index: int
    first: int
    count: int


class Step(Message, frozen=True):
    """Core -> every rank of its engine. A rank handles the fields in the order in which they stand here.

    An empty step is a ping through all ranks: it is answered like any other.
    """

    number: int
    finished: list[str] = []  # forget these sequences
    evict: list[bytes] = []  # drop these media hashes from the encoder cache
    started: list[NewSequence] = []
    encode: list[EncodeItem] = []
    chunks: list[Chunk] = []
    release: list[MessageId] = []  # drop these tensor messages, received or yet to come
    drop_senders: list[int] = []  # drop all messages of these incarnations, received or yet to come


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    token_id: int
    logprobs: list[TokenLogprob] = []  # if asked for: the token itself, then the likeliest


class StepResult(Message, frozen=True):
    """Rank -> core, in step order. Rank 0 gives the tokens, the others an empty list."""

    number: int
    tokens: list[SampledToken] = []


class WorkerReady(Message, frozen=True):
    """Rank -> core: model loaded, KV cache allocated."""

    rank: int
    num_blocks: int
    device: str  # "cpu" or "cuda"


class MediaReady(Message, frozen=True):
    """Rank -> core, from its receiver thread: this message lies on the rank's device, or is on its way there."""

    rank: int
    message: MessageId


class MediaFailed(Message, frozen=True):
    """Rank -> core: this tensor message came but cannot be used. `why` is for the log, not for clients."""

    rank: int
    message: MessageId
    why: str


# --- API server <-> rank, over the transports themselves -------------------------------------------------------------


class TensorMessage(Message, frozen=True):
    """Head of a tensor message: where each tensor lies in the one buffer that follows.

    `probe` asks for a `ProbeResult` instead of a place in the table.
    """

    number: int
    nbytes: int
    tensors: list[TensorLayout]
    buffer: int = 0  # torch_shm: number of the pooled buffer; its descriptor comes with its first use
    generation: int = 0  # torch_shm: counts the buffer's uses
    probe: bool = False
    dropped: list[int] = []  # torch_shm: buffers that are no more; unmap them. Such a head has number 0 and no tensors


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """One tensor inside a tensor message's buffer, C-contiguous."""

    offset: int  # bytes from the start of the buffer; a multiple of 64
    shape: tuple[int, ...]
    dtype: str


class ProbeResult(Message, frozen=True):
    """Rank -> API server, on the probed connection: `checksum` of the probe's bytes (CRC-32), or why it failed."""

    checksum: int
    error: str | None = None


AnyMessage = (
    Hello | Init | Ready | Start | Serving | PeerGone
    | NewRequest | Finish | ResetCaches | Outputs | Consumed | CachesReset
    | Step | StepResult | WorkerReady | MediaReady | MediaFailed
    | TensorMessage | ProbeResult
)  # fmt: skip
