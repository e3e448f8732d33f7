"""Between an engine core and its workers."""

import msgspec

from mini_engine.messages.requests import PoolingParams, Problem, SamplingParams, TokenLogprob
from mini_engine.messages.tensors import MediaItem, Message, MessageId, TensorHandle


class NewSequence(msgspec.Struct, frozen=True):
    """A request for the workers, which keep it until `Step.finished` names it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    media: list[MediaItem]
    pooling: PoolingParams | None = None  # with it the last chunk of the prompt samples nothing: `StepResult.pooled`


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens `start .. start + num_tokens` of a sequence; the ranks sampled those past the prompt."""

    request_id: str
    start: int
    num_tokens: int
    block_ids: list[int]  # blocks added to the sequence's table by this step
    samples: bool  # True when the chunk reaches the last known token: sample the next one
    restart: bool = False  # `block_ids` replace the table; tokens before `start` are in them already
    snapshots: list[tuple[int, int]] = []  # (end, state index): copy the recurrent state after tokens `0 .. end` there


class StateStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's recurrent state lies in `state_index` from now on: a copy of the snapshot in `source`, or empty."""

    request_id: str
    state_index: int
    source: int | None


class EncodeItem(msgspec.Struct, frozen=True, array_like=True):
    """Run blocks `begin .. end` of the vision tower on temporal grids `first .. first + count` of media item `index` of
    a sequence; `end` None: to the last one.

    No attention crosses temporal grids, so a long video may be encoded over several steps: in order, each grid once.
    A single grid may stop between blocks, and goes on in a later step, for any sequence with an item of that hash. The
    ranks keep its hidden states until then, or until `Step.evict`.
    The embeddings stay in the rank's encoder cache, for every sequence with an item of that hash, until `Step.evict`.
    """

    request_id: str
    index: int
    first: int
    count: int
    begin: int = 0
    end: int | None = None


class KeepMedia(msgspec.Struct, frozen=True, array_like=True):
    """Copy a received tensor, and keep the copy under its hash until `Step.drop` names it."""

    media_hash: bytes
    patches: TensorHandle


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that requests follow from now on, until `Step.unused_grammars` names it."""

    digest: bytes  # see `SamplingParams.grammar`
    text: str  # in llguidance's Lark
    client: bytes  # of these requests; clients take turns
    number: int  # of this order, for its report


class Step(Message, frozen=True):
    """Core -> every rank of its engine. A rank handles the fields in this order. An empty step is a ping through all
    ranks."""

    number: int
    finished: list[str] = []  # forget these sequences
    evict: list[bytes] = []  # drop these media hashes from the encoder cache, and hidden states
    drop: list[bytes] = []  # drop these kept media
    keep: list[KeepMedia] = []
    unused_grammars: list[bytes] = []  # digests; no sequence follows them any more
    grammars: list[Grammar] = []  # rank 0 has them compiled, and reports each by `GrammarReady`
    started: list[NewSequence] = []
    states: list[StateStart] = []
    encode: list[EncodeItem] = []
    chunks: list[Chunk] = []
    release: list[MessageId] = []  # drop these tensor messages, which every rank has reported
    drop_senders: list[int] = []  # drop all messages of these incarnations, received and later ones
    high_water_mark: int | None = None  # bytes of the media store that are in use, or soon will be: pin them


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    token_id: int
    logprobs: list[TokenLogprob] = []  # see `RequestOutput`
    problem: Problem | None = None  # its grammar can be followed no further


class StepResult(Message, frozen=True):
    """Rank -> core, in step order. Only rank 0's has more than the number."""

    number: int
    tokens: list[SampledToken] = []
    rank: int = 0
    pooled: dict[str, bytes] = {}  # by request id, see `RequestOutput`
    prompt_logprobs: dict[str, bytes] = {}  # likewise, each row once, also if its chunk is computed again


class WorkerReady(Message, frozen=True):
    """Rank -> core: model loaded, KV cache allocated."""

    rank: int
    num_blocks: int
    device: str  # "cpu" or "cuda"
    num_states: int = 0  # recurrent states; 0: the model has none


class GrammarReady(Message, frozen=True):
    """Rank 0 -> core, once for each of `Step.grammars`, unless it is unused by then."""

    number: int
    digest: bytes
    problem: Problem | None = None  # it cannot be followed


class MediaReady(Message, frozen=True):
    """Rank -> core, from its receiver thread: this message lies on the rank's device, or a copy to it has started."""

    rank: int
    message: MessageId
    problem: str = ""  # why the rank cannot read it, for the log, not for clients
