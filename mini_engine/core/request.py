"""A request as the engine core sees it: tokens, block ids, handles, and references to cached media."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import itertools
import os
import time
from collections.abc import Iterator

import msgspec

from mini_engine.messages import EngineTimes, ItemFacts, MediaItem, MessageId, NewRequest, StoreHandle, TensorHandle

HASH_BYTES = 16


@dataclasses.dataclass(eq=False, slots=True)
class MediaEntry:
    """One cached item, see `MediaDirectory`."""

    facts: ItemFacts
    nbytes: int  # that evicting it frees: in the store, those of whole pages
    patches: StoreHandle | None = None  # None: the ranks have copies
    writer: int = 0  # incarnation of the API server that has the extents reserved
    references: int = 0

    @property
    def extents(self) -> list[tuple[int, int]]:
        """In the store."""
        return self.patches.extents if self.patches else []


References = dict[bytes, MediaEntry]
"""A request's references to cached media, by media hash."""


@dataclasses.dataclass(eq=False, slots=True)
class MediaSources:
    """Where the ranks have the media of a request and its children, which share them.

    Released once every item is encoded, or when the last sample ends. Not before: a prompt found in the prefix cache
    needs no embeddings, but after a preemption it may not be found again.
    """

    messages: list[MessageId]  # tensor messages, each once
    references: References
    embeddings: list[bytes]  # hashes of items without another source: the request runs only if they are encoded
    users: int  # samples that have not ended
    released: bool  # or about to be; or there are none


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One accepted sample of a request: the ranks compute its tokens, the core counts them.

    Tokens that dispatched steps will sample count as known: the next step can be scheduled while the last one runs.
    """

    new: NewRequest
    id: str
    seed: int
    sender: int  # incarnation of its API server
    arrival: int  # counts up over the requests of an engine
    prefix_salt: bytes | None  # its blocks are shared within one salt; None: not shared
    sources: MediaSources
    parent: Request | None = None  # has not computed the prompt yet, which its children then share
    children: list[Request] = dataclasses.field(default_factory=list)  # they start when the prompt is computed
    tokens: list[int] = dataclasses.field(init=False)  # the prompt and the output reported so far
    num_computed: int = 0  # tokens whose keys and values are in the cache once the dispatched steps have run
    num_sampled: int = 0  # output tokens sampled by dispatched steps, those not reported yet among them
    blocks: list[int] = dataclasses.field(default_factory=list)
    hashes: list[bytes] = dataclasses.field(default_factory=list)  # of the full blocks of `tokens`
    num_counted: int = 0  # prompt tokens in `EngineStats.prompt_tokens`: none twice, after a preemption either
    num_published: int = 0  # of `blocks`: those in the prefix cache
    epoch: int = 0  # raised when it loses its blocks
    reserved: dict[bytes, int] = dataclasses.field(default_factory=dict)  # room in the encoder cache: hash -> tokens
    state: int | None = None  # index of its recurrent state while it runs
    last_snapshot: bytes | None = None  # prefix hash of the latest one in its output, which the next one replaces
    num_cached: int | None = None  # prompt tokens found in the prefix cache when it was first admitted
    accepted_at: float = 0.0  # when all ranks had its media
    scheduled_at: float = 0.0  # when a step first began to work on it, and the ranks got to know the sequence
    encoded_at: float = 0.0  # when the last of its media was encoded, perhaps for another request; 0: before it came
    times: EngineTimes | None = None  # known with its first token

    def __post_init__(self) -> None:
        self.tokens = list(self.new.prompt_token_ids)

    @classmethod
    def of(
        cls, new: NewRequest, references: References, sender: int, arrivals: Iterator[int], share_prefixes: bool
    ) -> Request:
        """The first sample of `new`, with the others as its children. They share blocks with all requests of the same
        cache salt, or only with each other without `share_prefixes`."""
        if new.arrival is not None:  # the numbers that it had
            arrivals = itertools.count(new.arrival)
        salt = os.urandom(HASH_BYTES) if new.children else None
        if share_prefixes:
            salt = hashlib.blake2b(new.cache_salt.encode(), digest_size=HASH_BYTES, person=b"cache salt").digest()
        messages = dict.fromkeys(item.patches.message for item in new.media if isinstance(item.patches, TensorHandle))
        sourceless = (item.media_hash for item in new.media if item.patches is None)
        embeddings = [media_hash for media_hash in sourceless if media_hash not in references]
        sources = MediaSources(list(messages), references, embeddings, 1 + len(new.children), released=not new.media)

        def sample(request_id: str, seed: int, parent: Request | None = None) -> Request:
            return cls(new, request_id, seed, sender, next(arrivals), salt, sources, parent)

        parent = sample(new.request_id, new.sampling.seed)
        parent.children = [sample(child.request_id, child.seed, parent) for child in new.children]
        for child in parent.children:
            child.num_counted = child.num_prompt  # one prompt, with the parent
        return parent

    @property
    def media(self) -> list[MediaItem]:
        return self.new.media

    def unreserved(self, start: int) -> dict[bytes, int]:
        """The items for which it has to reserve room in the encoder cache to compute its tokens from `start` on.

        Not those before, in cached blocks: if it is preempted and the blocks are gone, it reserves room for them then,
        and they are encoded. Without patches they could not be; and children share one reservation.
        """
        needs_all = self.sources.embeddings or self.sources.users > 1
        needed = {item.media_hash: item.num_tokens for item in self.media if needs_all or item.end > start}
        return {media_hash: tokens for media_hash, tokens in needed.items() if media_hash not in self.reserved}

    @property
    def is_running(self) -> bool:
        return bool(self.blocks)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key among the requests of its client: priority, then arrival."""
        return self.new.priority, self.arrival

    @property
    def num_prompt(self) -> int:
        return len(self.new.prompt_token_ids)

    @property
    def num_reusable(self) -> int:
        """Known tokens that may come from the prefix cache: not the last, and no token of the prompt whose log
        probabilities are requested and not delivered yet."""
        is_listing = self.new.sampling.prompt_logprobs is not None and self.num_counted < self.num_prompt
        return self.num_counted if is_listing else self.num_known - 1

    @property
    def num_delivered(self) -> int:
        """Output tokens sent to the API server."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens that exist or will exist once the dispatched steps have run."""
        return self.num_prompt + self.num_sampled

    @property
    def num_missing(self) -> int:
        """Known tokens that no dispatched step computes; 0 at the end of the output."""
        return 0 if self.num_sampled >= self.new.sampling.max_tokens else self.num_known - self.num_computed

    def times_so_far(self) -> EngineTimes | None:
        """For the output with its first token, and with its last; None for a child. Called when the token arrives."""
        if self.id != self.new.request_id:
            return None
        now = time.monotonic()
        if self.times is None:
            encoded = max(self.scheduled_at, self.encoded_at)
            self.times = EngineTimes(self.accepted_at, self.scheduled_at, encoded, now, now)
        return msgspec.structs.replace(self.times, last_token=now)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """A hash for each full block of `tokens`: of its tokens, the media in it, and the block before it.

        Chained, so that equal hashes mean equal prefixes; the chain begins with the salt. An item counts in each of
        its blocks, since all items have the same placeholder tokens.
        """
        if self.prefix_salt is None:
            return []
        while (len(self.hashes) + 1) * block_size <= len(self.tokens):
            start = len(self.hashes) * block_size
            end = start + block_size
            digest = hashlib.blake2b(self.hashes[-1] if self.hashes else self.prefix_salt, digest_size=HASH_BYTES)
            digest.update(array.array("q", self.tokens[start:end]).tobytes())
            for item in self.media:
                if item.offsets[0] < end and item.end > start:
                    digest.update(item.media_hash)
            self.hashes.append(digest.digest())
        return self.hashes
