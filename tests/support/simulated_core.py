"""An engine core with simulated ranks, to be driven turn by turn."""

import itertools
from collections import Counter

from mini_engine import messages
from mini_engine.config import BUNDLED_MODEL, EngineConfig
from mini_engine.core.caches.media_store import MediaStore, RankCopies
from mini_engine.core.engine_core import EngineCore
from mini_engine.core.pending_steps import NextStep
from mini_engine.core.request_limits import engine_limits
from mini_engine.model.config import ModelConfig
from mini_engine.transport.page_allocator import PAGE_BYTES
from tests.support.simulated_ranks import SimulatedLinks

API, OTHER = ("api 0", 7), ("api 1", 9)
MODEL = ModelConfig.from_dir(BUNDLED_MODEL)
BYTES = 4 * MODEL.vision.patch_dim  # of one token


class World:
    """An engine core with simulated ranks and a recording API server; `snapshots`: None without recurrent states;
    `seconds`: see `SimulatedLinks`."""

    def __init__(
        self,
        blocks=64,
        block_size=4,
        max_seqs=8,
        max_tokens=16,
        ranks=1,
        model=MODEL,
        snapshots=None,
        seconds=(0.02, 0.001, 0.002),
        **flags,
    ):
        sizes = {"max_num_seqs": max_seqs, "max_num_batched_tokens": max_tokens, "max_model_len": blocks * block_size}
        config = EngineConfig(tensor_parallel_size=ranks, block_size=block_size, **sizes, **flags)
        self.links = links = SimulatedLinks(config, seconds)
        limits = engine_limits(config, model, blocks, "cpu", 0 if snapshots is None else max_seqs + snapshots)
        next_step = NextStep()
        self.core = EngineCore(config, model, limits, self.make_media(next_step), self.links, next_step)
        self.core.scheduler.times.clock = lambda: links.now
        self.pool = self.core.blocks
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[str]] = {}
        self.errors: dict[str, messages.Problem | None] = {}
        self.times: dict[str, list[messages.EngineTimes]] = {}
        self.pooled: dict[str, bytes] = {}
        self.listed: dict[str, list[int]] = {}  # tokens of prompts whose log probabilities were sent
        self.cached: Counter[str] = Counter()
        self.consumed: list[messages.MessageId] = []
        self.missed: dict[str, int | None] = {}  # what `MediaMiss` says of requests
        self.replies: list[object] = []  # everything else

    def make_media(self, next_step):
        return RankCopies(1 << 30, next_step)

    def receive(self, body, sender=API):
        if isinstance(body, messages.MediaReady):
            self.links.reported.add((body.rank, body.message))
        self.links.inbox.append(messages.Envelope(sender[1], body))

    def request(
        self, name, prompt=5, max_tokens=4, media=(), first_token=20, tokens=None, sender=API, ready=True, **more
    ):
        """A request whose prompt counts up from `first_token`, but for the placeholders of its media. All ranks have
        these if `ready`."""
        tokens = tokens or [first_token + i % 500 for i in range(prompt)]
        for item in media:
            for offset in item.offsets:
                tokens[offset : offset + item.run_length] = [MODEL.video_token_id] * item.run_length
        stop, digest = more.pop("stop", []), more.get("grammar", "").encode()
        listed = more.pop("prompt_logprobs", None)
        sampling = messages.SamplingParams(max_tokens, 1, stop_token_ids=stop, grammar=digest, prompt_logprobs=listed)
        self.receive(messages.NewRequest(name, tokens, sampling, list(media), **more), sender)
        sent = dict.fromkeys(item.patches.message for item in media if item.patches)
        for message, rank in itertools.product(sent if ready else (), range(self.links.num_ranks)):
            self.media_ready(message, rank)

    def run_request(self, name, *args, **more):
        self.request(name, *args, **more)
        self.finish(name)

    def media_ready(self, message, rank=0):
        self.receive(messages.MediaReady(rank, message), ("worker 0.0 media", 100))

    def grammar_ready(self, grammar, problem=None):
        digest = grammar.encode()
        self.links.compiled.add(digest)
        self.receive(messages.GrammarReady(self.links.grammars[digest], digest, problem), ("worker 0.0 grammars", 100))

    def turn(self):
        """One turn of the core's loop, and what it sent to the API server."""
        self.core.turn()
        for body in self.links.sent:
            if isinstance(body, messages.MediaMiss):
                self.missed[body.request_id] = body.arrival
            elif isinstance(body, messages.Outputs):
                self.consumed += body.consumed
                for output in body.outputs:
                    self._record(output)
            else:
                self.replies.append(body)
        self.links.sent.clear()

    def _record(self, output):
        request_id = output.request_id
        assert request_id not in self.ends, "an output after the end"
        rows = output.prompt_logprobs
        assert not (rows and self.tokens.get(request_id)), "a part of the prompt after a token"
        numbers = [int.from_bytes(rows[at : at + 4]) for at in range(0, len(rows), 4)]
        self.listed.setdefault(request_id, []).extend(numbers)
        self.tokens.setdefault(request_id, []).extend(output.token_ids)
        self.pooled |= {request_id: output.pooled} if output.pooled else {}
        self.cached[request_id] += output.num_cached_tokens
        if output.times is not None:
            self.times.setdefault(request_id, []).append(output.times)
        if output.finish_reason:
            self.ends[request_id], self.errors[request_id] = [output.finish_reason], output.error

    def reply(self, kind, body, sender=API):
        """The core's answer, of this type, to a message."""
        self.receive(body, sender)
        self.turn()
        return next(reply for reply in reversed(self.replies) if isinstance(reply, kind))

    def stats(self) -> messages.EngineStats:
        """The engine's gauges, and events since the last call."""
        return self.reply(messages.ControlReply, messages.ControlRequest(0, "stats")).stats

    @property
    def idle(self):
        """Hashes of cached media that no request refers to, least recently used first."""
        return [*self.core.media.idle]

    def run_steps(self, count=1000, until=None):
        """So many turns, after each of which the ranks run a step, or until a request has ended; returns how many."""
        for number in range(count):
            if until in self.ends:
                return number
            self.turn()
            if self.links.steps:
                self.links.run_step()
        return count

    def run(self, turns=2000):
        for _ in range(turns):
            self.turn()
            if not self.links.steps and not self.links.inbox:
                return
            if self.links.steps:
                self.links.run_step()
        raise AssertionError("the core does not come to rest")

    def finish(self, *names):
        self.run()
        assert all(self.ends[name] == ["length"] for name in names), self.ends

    def assert_at_rest(self):
        core, links, states = self.core, self.links, self.core.states
        assert not core.requests and not core.in_flight and not [*core.scheduler.queues.in_turns()]
        assert not core.arrivals._entries and not core.unready
        assert not core.grammars._entries and not links.grammars
        assert not links.sequences, "the ranks still keep a sequence"
        assert links.num_grids.keys() == links.encoded.keys(), "the ranks still keep half of an item"
        assert not links.num_blocks, "the ranks still keep hidden states"
        assert self.pool.num_used == 0
        kept = len([*states._sequences, *states._unused, *states._snapshots])
        assert not states.is_needed or kept == core.limits.num_states
        assert core.encoder.num_tokens == core.encoder.num_idle_tokens == sum(links.encoded.values())
        assert core.media.num_references == 0 == core.media.num_bytes_pinned
        if isinstance(core.media, MediaStore):
            assert not core.media.reservations
            assert core.media.num_bytes == core.media.pages.num_used * PAGE_BYTES
        else:
            assert set(self.idle) == links.kept


def item(message, offset, num_tokens=2, index=0, media_hash=None, grids=1, gap=0):
    """A video of so many temporal grids, with `gap` text tokens between them; unique without a hash. Without a message
    it has no tensor."""
    media_hash = media_hash or b"%d %d" % (message.number, index)
    patches = messages.TensorHandle(message, (4 * num_tokens, MODEL.vision.patch_dim)) if message else None
    grid = (grids, 2, 2 * num_tokens // grids)
    offsets = [offset + number * (num_tokens // grids + gap) for number in range(grids if gap else 1)]
    return messages.MediaItem(media_hash, "video", num_tokens, grid, 1.0, offsets=offsets, patches=patches)


def message(number):
    return messages.MessageId(API[1], number)


class CachingWorld(World):
    """One with a media cache of type `lru`, with room for so many items of two tokens, or `shm`, of so many pages."""

    def __init__(self, kind, room=16, **flags):
        self.kind, self.room = kind, room
        super().__init__(**{"encoder_cache_tokens": 4, "enable_prefix_caching": False} | flags)

    def make_media(self, next_step):
        if self.kind == "lru":
            return RankCopies(self.room * 2 * BYTES, next_step)
        return MediaStore(self.room * PAGE_BYTES, MODEL.vision.patch_dim, lambda: 1 << 50)

    def look_up(self, request_id, media_hash, sender=API) -> str:
        """What the core has of an item, "" if it does not know it."""
        found = self.reply(messages.Found, messages.Lookup(request_id, [media_hash]), sender).items
        return found[0].held if found else ""

    def reserve(self, request_id, media_hash, num_tokens=2, sender=API) -> messages.Reserved:
        media = messages.ItemFacts.of(item(None, 0, num_tokens, media_hash=media_hash))
        return self.reply(messages.Reserved, messages.Reserve(request_id, media), sender)

    def write(self, reserved, *request_ids, sender=API):
        """Write an item, which these requests refer to then."""
        for first, count in reserved.extents:
            self.links.memory |= dict.fromkeys(range(first, first + count), reserved.media_hash)
        self.receive(messages.Written(reserved.media_hash, list(request_ids)), sender)
