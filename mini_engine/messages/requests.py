"""Between an API server and an engine core; `Ping` and `Pong` between the supervisor and both, too."""

from __future__ import annotations

from typing import Literal

import msgspec

from mini_engine.messages.base import Message
from mini_engine.messages.tensors import MediaItem, MessageId, Modality

FinishReason = Literal["stop", "length", "abort", "error"]


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


class CachedMedia(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt needs to know of an item that an engine's ranks can read."""

    media_hash: bytes
    modality: Modality
    num_tokens: int
    grid_thw: tuple[int, int, int]
    second_per_grid: float | None
    # What stands for it in a prompt's text, one placeholder token for each run of them. None: one run, nothing else.
    placeholder: str | None = None

    @classmethod
    def of(cls, item: MediaItem) -> CachedMedia:
        """What is to be known of the item once it is cached."""
        return cls(
            item.media_hash, item.modality, item.num_tokens, item.grid_thw, item.second_per_grid, item.placeholder
        )


class Lookup(Message, frozen=True):
    """API server -> core: which of these media are cached? The request refers to those from then on."""

    request_id: str
    hashes: list[bytes]


class Found(Message, frozen=True):
    """Core -> API server: the answer to `Lookup`."""

    request_id: str
    items: list[CachedMedia]


class Reserve(Message, frozen=True):
    """API server -> core: pages of the media store for this item, which the request brings."""

    request_id: str
    media: CachedMedia


class Reserved(Message, frozen=True):
    """Core -> API server: the answer to `Reserve`, of which an API server has one for a hash at a time."""

    media_hash: bytes
    # present: it is cached by now, and the request refers to it; full: no room; busy: another reservation of it is open
    outcome: Literal["reserved", "present", "full", "busy"]
    number: int = 0  # of the reservation
    extents: list[tuple[int, int]] = []  # (first page, pages); the item's bytes lie in them one after another


class Written(Message, frozen=True):
    """API server -> core: the item of this reservation lies in its pages; these requests refer to it."""

    number: int
    request_ids: list[str]


class Abandoned(Message, frozen=True):
    """API server -> core: this reservation is not written to, nor will be."""

    number: int


class Unreserve(Message, frozen=True):
    """API server -> core: this request will not come (again), and refers to nothing any more."""

    request_id: str


class Accepted(Message, frozen=True):
    """Core -> API server: all ranks have the media of these; what they were made from may be forgotten."""

    request_ids: list[str]


class MediaMiss(Message, frozen=True):
    """Core -> API server: this request was not accepted, since its tensors did not reach all ranks; send it again.

    It still refers to the cached media that it named. `late`: the tensors have not come in time. They are in order and
    still on their way, so sending them again would not help.
    """

    request_id: str
    late: bool = False


class Finish(Message, frozen=True):
    """API server -> core: end this request now: a stop string was found, or its client is gone.

    An id that is not running (any more) is ignored: the first terminal event has won.
    """

    request_id: str
    reason: FinishReason


class ResetCaches(Message, frozen=True):
    """API server -> core: forget every prefix, encoded item and cached item that no running request uses."""

    number: int  # comes back in `CachesReset`


class Ping(Message, frozen=True):
    """API server or supervisor -> core: are you and all your ranks at work? Supervisor -> API server: are you?"""

    number: int  # comes back in `Pong`


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of a token's probability before temperature, penalties and filters."""

    token_id: int
    logprob: float


class EngineTimes(msgspec.Struct, frozen=True, array_like=True):
    """When a request came how far at its engine: seconds of `time.monotonic()`, one clock for all processes of a host.

    Each is no sooner than the one before it.
    """

    accepted: float  # all ranks have its media
    scheduled: float  # a step has begun to work on it
    encoded: float  # the last of its media, by the end of that step; as `scheduled` when all were, or there are none
    first_token: float  # the step that sampled it has ended
    last_token: float  # of those told so far


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
    times: EngineTimes | None = None  # with the first and the last tokens of a request, not with those of its siblings


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges of one engine core at this moment."""

    running: int
    waiting: int
    kv_blocks_used: int  # held by requests; cached blocks that nobody holds are free
    kv_blocks_total: int
    encoder_cache_tokens: int = 0
    media_bytes: int = 0  # of cached media
    media_bytes_pinned: int = 0  # of those, the part that running requests refer to
    media_references: int = 0  # from running requests to cached media
    media_oldest_seconds: float = 0.0  # since the cached item that was unused for longest was used


class EngineCounters(msgspec.Struct, frozen=True, array_like=True):
    """What has happened in an engine core since it last told; each event is told once, to who asked."""

    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    encoder_cache_queries: int = 0  # media items needed
    encoder_cache_hits: int = 0  # media items found encoded, or on the way to be
    preemptions: int = 0
    media_evictions: int = 0  # cached media dropped to make room


class Outputs(Message, frozen=True):
    """Core -> API server: what one turn of the core's loop brought for its requests."""

    outputs: list[RequestOutput]


class AskFigures(Message, frozen=True):
    """API server -> core: somebody reads the metrics."""


class Figures(Message, frozen=True):
    """Core -> API server, at once: the answer."""

    stats: EngineStats
    counters: EngineCounters


class CachesReset(Message, frozen=True):
    """Core -> API server: `ResetCaches(number)` is done."""

    number: int


class Pong(Message, frozen=True):
    """The answer to `Ping(number)`; a core's: since it came, all ranks have reported a step."""

    number: int


class Consumed(Message, frozen=True):
    """Core -> API server: no rank will read these tensor messages again; their memory is the sender's once more."""

    messages: list[MessageId]
