"""An engine core with simulated ranks, to be driven turn by turn."""

from __future__ import annotations

import dataclasses

from mini_engine.config import BUNDLED_MODEL, EngineConfig
from mini_engine.core.engine_core import EngineCore
from mini_engine.core.media_store import MediaStore, RankCopies
from mini_engine.core.request_limits import engine_limits
from mini_engine.core.scheduler import Budgets
from mini_engine.messages import (
    CachedMedia,
    ControlReply,
    ControlRequest,
    EngineStats,
    EngineTimes,
    Envelope,
    Found,
    GrammarReady,
    Lookup,
    MediaFailed,
    MediaItem,
    MediaMiss,
    MediaReady,
    MessageId,
    NewRequest,
    Outputs,
    Reserve,
    Reserved,
    SamplingParams,
    TensorHandle,
    Written,
)
from mini_engine.model.config import ModelConfig
from mini_engine.transport.pages import PAGE_BYTES
from tests.support.simulated_ranks import SimulatedLinks

API = ("api 0", 7)


MODEL = ModelConfig.from_dir(BUNDLED_MODEL)
# One whose prompts have text between the temporal grids of a video.
TIMED = dataclasses.replace(MODEL, text_tells_time=True)


class World:
    """An engine core with simulated ranks and one recording API server; `snapshots`: None without recurrent states."""

    def __init__(
        self, blocks=64, block_size=4, max_seqs=8, max_tokens=16, ranks=1, media=None, model=MODEL, snapshots=None,
        **more,
    ):  # fmt: skip
        media = RankCopies(1 << 30) if media is None else media
        config = EngineConfig(
            tensor_parallel_size=ranks, max_num_seqs=max_seqs, max_num_batched_tokens=max_tokens,
            block_size=block_size, max_model_len=blocks * block_size, **more,
        )  # fmt: skip
        self.links = SimulatedLinks(config)
        self.links.identities[API[1]] = b"api 0:7"
        limits = engine_limits(config, model, blocks, "cpu", 0 if snapshots is None else max_seqs + snapshots)
        self.core = EngineCore(
            config, model, limits, Budgets.of(config, "cpu", snapshots is not None), media, self.links
        )
        self.pool = self.core.blocks
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[str]] = {}
        self.errors: dict[str, str] = {}
        self.times: dict[str, list[EngineTimes]] = {}
        self.cached: dict[str, int] = {}
        self.consumed: list[MessageId] = []
        self.found: dict[str, list[bytes]] = {}  # of each request's last question
        self.rejected: list[str] = []
        self.told: list[object] = []  # everything else

    def receive(self, body, sender=API):
        if isinstance(body, MediaReady | MediaFailed):
            self.links.reported.add((body.rank, body.message))
        self.links.inbox.append(Envelope(*sender, body))

    def request(
        self, request_id, prompt=5, max_tokens=4, media=(), stop=(), first_token=20, tokens=None, sender=API, **more
    ):
        """A request whose prompt counts up from `first_token`, but for the placeholders of its media."""
        tokens = tokens or [first_token + i % 500 for i in range(prompt)]
        for one in media:
            for offset in one.offsets:
                tokens[offset : offset + one.run_length] = [MODEL.video_token_id] * one.run_length
        sampling = SamplingParams(max_tokens, 1, stop_token_ids=list(stop), grammar=more.get("grammar", "").encode())
        self.receive(NewRequest(request_id, tokens, sampling, list(media), **more), sender)

    def look_up(self, request_id, *hashes, sender=API):
        """Ask which of these are cached: the request refers to them then."""
        self.receive(Lookup(request_id, list(hashes)), sender)
        self.turn()
        return self.found[request_id]

    def media_ready(self, message, rank=0):
        self.receive(MediaReady(rank, message), ("worker 0.0 media", 100))

    def grammar_ready(self, grammar, problem=""):
        digest = grammar.encode()
        self.links.compiled.add(digest)
        ready = GrammarReady(self.links.grammars[digest], digest, problem)
        self.receive(ready, ("worker 0.0 grammars", 100))

    def turn(self):
        """One turn of the core's loop, and what it sent to the API server."""
        self.core.turn()
        for _, body in self.links.sent:
            if isinstance(body, Outputs):
                for output in body.outputs:
                    self._take(output)
                self.consumed += body.consumed
            elif isinstance(body, Found):
                self.found[body.request_id] = [media.media_hash for media in body.items]
            elif isinstance(body, MediaMiss):
                self.rejected.append(body.request_id)
            else:
                self.told.append(body)
        self.links.sent.clear()

    def _take(self, output):
        assert output.request_id not in self.ends, "told something after its end"
        self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        self.cached[output.request_id] = self.cached.get(output.request_id, 0) + output.num_cached_tokens
        if output.times is not None:
            self.times.setdefault(output.request_id, []).append(output.times)
        if output.finish_reason:
            self.ends.setdefault(output.request_id, []).append(output.finish_reason)
            self.errors[output.request_id] = output.error

    def stats(self) -> EngineStats:
        """The engine's gauges, and events since the last call."""
        self.receive(ControlRequest(0, "stats"))
        self.turn()
        return next(body.stats for body in reversed(self.told) if isinstance(body, ControlReply) and body.stats)

    @property
    def idle(self):
        """Hashes of cached media that no request refers to, least recently used first."""
        return [entry.media.media_hash for entry in self.core.media.idle]

    @property
    def started(self):
        """What the ranks received about each sequence."""
        return self.links.started

    def run(self, turns=2000):
        for _ in range(turns):
            self.turn()
            if not self.links.steps and not self.links.inbox:
                return
            if self.links.steps:
                self.links.run_step()
        raise AssertionError("the core does not come to rest")

    def assert_at_rest(self):
        assert self.pool.num_used == 0
        states = self.core.states
        assert not states.is_needed or states.num_free + states.num_snapshots == self.core.limits.num_states
        assert not self.core.requests
        assert not [*self.core.scheduler.clients.in_turns()]
        assert not self.links.sequences, "the ranks still keep a sequence"
        assert self.links.num_grids.keys() == self.links.encoded.keys(), "the ranks still keep half of an item"
        steps = self.core.steps
        assert not steps.in_flight and not steps.finished and not steps.release and not steps.unreferenced
        assert not len(self.core.awaiting_media)
        assert not len(self.core.grammars) and not self.links.grammars
        assert self.core.media.num_references == 0 == self.core.media.num_bytes_pinned
        if isinstance(self.core.media, MediaStore):
            assert not self.core.media.reservations
            assert self.core.media.num_bytes_idle == self.core.media.pages.num_used * PAGE_BYTES
        else:
            assert self.core.media.num_bytes_idle == self.core.media.num_bytes
            assert set(self.idle) == self.links.kept
        assert self.core.encoder.num_tokens == sum(self.links.encoded.values())
        assert self.core.encoder.num_tokens == self.core.encoder.num_idle_tokens
        assert len(self.core.arrivals) == 0


def item(message, offset, num_tokens=2, index=0, media_hash=None, grids=1, gap=0):
    """A video of so many temporal grids, with `gap` text tokens between them; unique without a hash."""
    media_hash = media_hash or b"%d %d" % (message.number, index)
    patches = TensorHandle(message, (4 * num_tokens, MODEL.vision.patch_dim), "uint8")
    grid = (grids, 2, 2 * num_tokens // grids)
    offsets = [offset + number * (num_tokens // grids + gap) for number in range(grids if gap else 1)]
    return MediaItem("video", offsets, num_tokens, grid, 1.0, patches if message else None, media_hash)


def message(number):
    return MessageId(API[1], number)


def finish(world, *names):
    world.run()
    assert all(world.ends[name] == ["length"] for name in names), world.ends


# --- cached media ----------------------------------------------------------------------------------------------------

BYTES = 4 * MODEL.vision.patch_dim  # of one token
OTHER = ("api 1", 9)


def named(offset, media_hash, num_tokens=2):
    """An item without a tensor."""
    return item(None, offset, num_tokens, media_hash=media_hash)


def copies_world(num_items, **more):
    """Cache type `lru`, with room for so many items of two tokens."""
    return World(media=RankCopies(num_items * 2 * BYTES), encoder_cache_tokens=4, enable_prefix_caching=False, **more)


def store_world(pages=16, **more):
    """Cache type `shm`: the ranks read the content of the pages, which is the hash of what was written there."""
    media = MediaStore(pages * PAGE_BYTES, MODEL.vision.patch_dim, lambda: 1 << 50)
    world = World(media=media, encoder_cache_tokens=4, enable_prefix_caching=False, **more)
    world.links.identities[OTHER[1]] = b"api 1:9"
    world.memory = {}
    world.links.read = lambda handle: world.memory[handle.extents[0][0]]
    return world


def reserve(world, request_id, media_hash, num_tokens=2, sender=API) -> Reserved:
    """What the core answers to a `Reserve`."""
    facts = CachedMedia.of(named(0, media_hash, num_tokens))
    world.receive(Reserve(request_id, facts), sender)
    world.turn()
    return next(body for body in reversed(world.told) if isinstance(body, Reserved))


def write(world, reserved, *request_ids, sender=API):
    for first, count in reserved.extents:
        world.memory |= dict.fromkeys(range(first, first + count), reserved.media_hash)
    world.receive(Written(reserved.number, list(request_ids)), sender)


def stored(world, media_hash, *request_ids, sender=API):
    """Write an item, which these requests refer to then."""
    reserved = reserve(world, "writer", media_hash, sender=sender)
    assert reserved.outcome == "reserved"
    write(world, reserved, *request_ids, sender=sender)
    world.turn()
