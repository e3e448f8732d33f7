"""Between an API server and an engine core; `ControlRequest` also from the supervisor to both."""

from typing import Literal

import msgspec

from mini_engine.messages.tensors import ItemFacts, MediaItem, Message, MessageId

FinishReason = Literal["stop", "length", "abort", "error"]


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """Why a request has to end."""

    text: str  # for the client
    retry: bool = False  # the request is right: sent again, it may succeed


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens, with the defaults of the model and the server filled in."""

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
    stop_token_ids: list[int] = []  # with the model's end-of-sequence tokens, unless `ignore_eos`
    min_tokens: int = 0  # no stop token is sampled before there are this many
    logprobs: int | None = None  # None: none; else for each sampled token and this many likeliest
    prompt_logprobs: int | None = None  # likewise for each token of the prompt but the first
    grammar: bytes = b""  # digest of `NewRequest.grammar`, client and cache salt, which share it; empty: any output


class PoolingParams(msgspec.Struct, frozen=True, array_like=True):
    """What to return of a prompt's last token, instead of sampling: float32 numbers."""

    token_ids: list[int] = []  # empty: its hidden state after the last norm; else the logits of these tokens


class ChildRequest(msgspec.Struct, frozen=True, array_like=True):
    """A further sample (`n` > 1) of a request, which differs in id and seed."""

    request_id: str
    seed: int


class NewRequest(Message, frozen=True):
    """API server -> core. Its tensors were sent before it, to the ranks."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams(max_tokens=1, seed=0)  # left out with `pooling`
    media: list[MediaItem] = []
    client: bytes = b""  # opaque; clients take turns
    priority: int = 0  # lower goes first, of one client's
    cache_salt: str = ""  # prefix-cache blocks are shared only within one salt
    children: list[ChildRequest] = []  # each ends in a finish message of its own
    arrival: int | None = None  # its place in the queue if it is sent again, from `MediaMiss`
    grammar: str = ""  # in llguidance's Lark: an output matches it, then a stop token ends it; empty: any output
    pooling: PoolingParams | None = None  # sample nothing, and have no children: one output ends it


class Lookup(Message, frozen=True):
    """API server -> core: which of these media, and of these names, are known? From then on the request refers to the
    media with patches."""

    request_id: str
    hashes: list[bytes]
    names: list[bytes] = []  # keys of names of which this engine is the home: see `EngineClient.preferred`


class FoundMedia(msgspec.Struct, frozen=True, array_like=True):
    """An item of which the engine knows the facts, and what else it has of it."""

    facts: ItemFacts
    # patches: the request refers to them; embeddings: in the encoder cache, perhaps not for long; facts: nothing else
    held: Literal["patches", "embeddings", "facts"]


class NamedMedia(msgspec.Struct, frozen=True, array_like=True):
    """What a name means. The media caches say whether they have it."""

    digest: bytes  # of the content; for a name that means nothing one that no content has
    url: bytes = b""  # digest of the `http(s)://` URL that the content was downloaded from, or of no text
    is_frames: bool = False  # a video that was sent as its frames


class Found(Message, frozen=True):
    """Core -> API server: answer to `Lookup`. The other items and names are unknown."""

    request_id: str
    items: list[FoundMedia]
    named: dict[bytes, NamedMedia] = {}


class BindName(Message, frozen=True):
    """API server -> core: the name with this key means this from now on, whatever it meant before."""

    key: bytes
    media: NamedMedia


class Reserve(Message, frozen=True):
    """API server -> core: pages of the media store for this item of the request."""

    request_id: str
    facts: ItemFacts


class Reserved(Message, frozen=True):
    """Core -> API server: answer to `Reserve`. An API server has at most one open `Reserve` for a hash."""

    media_hash: bytes
    # present: cached by now, and the request refers to it; full: no room; busy: another reservation of it is open
    outcome: Literal["reserved", "present", "full", "busy"]
    extents: list[tuple[int, int]] = []  # see `StoreHandle`


class Written(Message, frozen=True):
    """API server -> core: no thread writes to the pages that it has reserved for this item, and none will."""

    media_hash: bytes
    request_ids: list[str] | None  # the item is in the pages, and these requests refer to it; None: it was not written


class MediaMiss(Message, frozen=True):
    """Core -> API server: the request has ended without an output, and so have its references, since it cannot run
    with the media that were sent."""

    request_id: str
    # None: a rank cannot read its tensors. Else embeddings that it relied on have been evicted: it is to be sent again
    # with this `NewRequest.arrival`, and with the patches of all items whose data were sent.
    arrival: int | None = None


class Finish(Message, frozen=True):
    """API server -> core: end this request: stop string found, or client gone. One that has not been sent, and will not
    be, releases its references. Ignored after its end."""

    request_id: str
    reason: FinishReason


class ControlRequest(Message, frozen=True):
    """API server -> core; "ping" also supervisor -> core and supervisor -> API server."""

    number: int  # returned in `ControlReply`
    # ping: health check; stats: the metrics of the engine; reset_caches: drop all that no running request uses
    action: Literal["ping", "stats", "reset_caches"] = "ping"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of a token's probability before temperature, penalties and filters."""

    token_id: int
    logprob: float | None  # None: of a prompt's first token, which follows nothing


class EngineTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of a request at its engine, in order: seconds of `time.monotonic()`, which all processes share."""

    accepted: float  # all ranks have its media
    scheduled: float  # dispatch of its first step
    encoded: float  # end of the step that encoded the last of its media; as `scheduled` if none had to be encoded
    first_token: float  # end of the step that sampled it
    last_token: float  # of the tokens so far


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. The one with a `finish_reason` is the last, and there is exactly one."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: Problem | None = None  # with "error"
    logprobs: list[list[TokenLogprob]] = []  # if asked for, of each of `token_ids`: its own, then the likeliest
    num_cached_tokens: int = 0  # with the first tokens: how many of the prompt's tokens the prefix cache held
    times: EngineTimes | None = None  # with the first and the last tokens of a request, but not of its children
    pooled: bytes = b""  # of a request with `pooling`, little-endian float32: hidden_size numbers, or one of each token
    # Rows of further tokens of the prompt, from its second on, before any token of the answer. Little-endian int32
    # `[rows, 1 + 2 * (1 + k)]` for k, `SamplingParams.prompt_logprobs`: how many tokens are at least as likely as the
    # prompt's; the ids of that and of the k likeliest; the bits of their logprobs, float32
    prompt_logprobs: bytes = b""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Metrics of one engine core: gauges, and events since the last `EngineStats`, to whichever API server."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0  # fraction of the KV blocks that requests hold; other cached blocks are free
    encoder_cache_tokens: int = 0
    media_bytes: int = 0  # of cached media
    media_bytes_pinned: int = 0  # of those, items with references
    media_references: int = 0  # to cached media, from running requests and from steps that copy
    state_snapshots: int = 0  # of recurrent states
    media_facts: int = 0  # items of which the facts are known
    # Events:
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    encoder_cache_queries: int = 0  # media items needed
    encoder_cache_hits: int = 0  # media items found encoded, or being encoded
    media_tokens_encoded: float = 0.0  # by steps that have run; those of a part of the tower's blocks count in part
    prompt_tokens: int = 0  # of prompts: computed by steps that have retired, or found in the prefix cache before
    generation_tokens: int = 0  # sampled by steps that have retired
    preemptions: int = 0
    media_evictions: int = 0  # cached media dropped to make room
    media_needed: int = 0  # requests that were to be sent again: see `MediaMiss`
    state_snapshots_taken: int = 0
    state_snapshot_hits: int = 0  # admissions that began with one
    step_tokens: dict[int, int] = {}  # how many retired steps had so many tokens to compute


class Outputs(Message, frozen=True):
    """Core -> API server: what one turn of the core's loop has for it. Fields are handled in this order."""

    outputs: list[RequestOutput] = []
    consumed: list[MessageId] = []  # tensor messages that no rank reads again; the sender may reuse their memory


class ControlReply(Message, frozen=True):
    """Answer to `ControlRequest(number)`. A core answers a ping when all ranks have reported a step since then."""

    number: int
    stats: EngineStats | None = None
