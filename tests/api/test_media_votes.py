"""Owners and engines of the shared-memory store, together: two API servers, two engines, and messages that take time.

Everything is real but the sockets, the ranks and the memory: a wire delivers in order, when the test says so; ranks
look at what they read when they run a step, which may be long after it was dispatched.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.api.engine import Engine, Surroundings
from mini_engine.api.errors import EngineError
from mini_engine.api.media_store import MediaStore
from mini_engine.core.stored_media import StoredObjects
from mini_engine.messages import (
    CachedMedia,
    Envelope,
    MediaItem,
    MediaReady,
    NewRequest,
    PeerGone,
    ResetCaches,
    SamplingParams,
    StoreHandle,
    StoreObject,
    TensorHandle,
)
from mini_engine.transport import sockets
from mini_engine.transport.allocator import Allocator
from mini_engine.transport.codec import Encoder, decode
from tests.api.peers import MemoryTransport
from tests.api.test_app import metric
from tests.core.world import MODEL, World

BYTES = 4 * MODEL.vision.patch_dim  # of one token
SLACK = 512  # what alignment may take
FREED = b"freed"


class SegmentInMemory:
    """A `media_store.Segment` that remembers what lies where, by hash. It grows from half of its capacity once."""

    def __init__(self, incarnation: int, nbytes: int):
        self.incarnation = incarnation
        self.capacity = nbytes // 64 * 64
        self.allocator = Allocator()
        self.allocator.grow(nbytes // 128 * 64)
        self.contents: dict[int, tuple[StoreObject, bytes]] = {}
        self.offsets: dict[StoreObject, int] = {}
        self.number = 0

    @property
    def allocated_bytes(self) -> int:
        return self.allocator.capacity

    @property
    def free_bytes(self) -> int:
        return self.allocator.free_bytes

    def reserve(self, nbytes: int) -> SlotInMemory | None:
        offset = self.allocator.allocate(nbytes)
        if offset is None:
            return None
        self.number += 1
        made = StoreObject(self.incarnation, self.number)
        self.offsets[made] = offset
        return SlotInMemory(self, made, offset)

    async def grow(self, nbytes: int) -> bool:
        await asyncio.sleep(0)
        if self.allocator.capacity == self.capacity:
            return False
        self.allocator.grow(self.capacity - self.allocator.capacity)
        return True

    def would_fit(self, nbytes: int, freed: Iterable[StoreObject]) -> bool:
        return self.allocator.would_fit(nbytes, [self.offsets[each] for each in freed])

    def free(self, object: StoreObject) -> None:
        offset = self.offsets.pop(object)
        self.contents[offset] = (object, FREED)
        self.allocator.free(offset)

    def read(self, handle: StoreHandle) -> bytes:
        made, content = self.contents[handle.offset]
        assert made == handle.object, "the object there is another"
        return content

    def close(self) -> None:
        pass


class SlotInMemory:
    def __init__(self, segment: SegmentInMemory, object: StoreObject, offset: int):
        self.segment, self.object, self.offset = segment, object, offset

    def fill(self, tensor: Any) -> StoreHandle:
        self.segment.contents[self.offset] = (self.object, bytes(tensor[0, :16]))
        return StoreHandle(self.object, self.offset, tensor.shape, "uint8")


class Wire:
    """One socket of an API server: `sent` waits for the engine, `inbox` for the API server."""

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()
        self.on_the_way: deque[bytes] = deque()
        self.inbox: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, frame: bytes, flags: int) -> asyncio.Future[None]:
        assert flags == zmq.NOBLOCK
        self.sent.append(frame)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def recv(self) -> bytes:
        return await self.inbox.get()

    def close(self) -> None:
        pass


def media_of(value: int) -> tuple[bytes, torch.Tensor, int]:
    """Hash, patches and tokens of one medium."""
    media_hash = bytes([value]) * 16
    tokens = 1 + value % 3
    patches = torch.full((4 * tokens, MODEL.vision.patch_dim), value, dtype=torch.uint8)
    return media_hash, patches, tokens


class ApiServer:
    """A real store and real engines, on wires."""

    def __init__(self, slot: int, incarnation: int, num_engines: int, capacity: int):
        self.name = f"api {slot}"
        self.incarnation = incarnation
        self.encoder = Encoder(self.name, incarnation)
        self.segment = SegmentInMemory(incarnation, capacity)
        self.store = MediaStore(
            self.segment, 1 << 30, num_engines, lambda number, body: self.engines[number].tell(body)
        )
        numbers = iter(range(1, 1 << 30))
        around = Surroundings(self.encoder, numbers, 1, 1 << 30, self.store, lambda: None)
        self.wires = [Wire() for _ in range(num_engines)]
        self.transports = [MemoryTransport(ranks=1) for _ in range(num_engines)]
        self.engines = [
            Engine(number, wire, [transport], around)  # type: ignore[arg-type]
            for number, (wire, transport) in enumerate(zip(self.wires, self.transports, strict=True))
        ]
        self.receiving = [asyncio.create_task(engine.receive()) for engine in self.engines]
        self.requests: dict[str, asyncio.Task[str]] = {}
        self.decodes = 0

    def ask(self, request_id: str, engine: Engine, values: list[int]) -> None:
        self.requests[request_id] = asyncio.create_task(self._ask(request_id, engine, values))

    async def _ask(self, request_id: str, engine: Engine, values: list[int]) -> str:
        media: list[MediaItem] = []
        tokens = [20]
        for value in values:
            media_hash, patches, count = media_of(value)
            known: CachedMedia | None = engine.media.look_up([media_hash]).get(media_hash)
            self.decodes += known is None
            grid = (1, 2, 2 * count)
            media.append(
                MediaItem("video", len(tokens), count, grid, 1.0, patches if known is None else None, media_hash)
            )
            tokens += [MODEL.video_token_id] * count
        request = NewRequest(request_id, [*tokens, 21, 22], SamplingParams(max_tokens=3, seed=1), media)
        with await engine.submit(request, self._refill) as generation:
            async for new in generation:
                if new.finish_reason:
                    return new.finish_reason
        raise AssertionError("no end")

    async def _refill(self, request: NewRequest, hashes: Any) -> NewRequest:
        await asyncio.sleep(0)
        media = [
            MediaItem(
                item.modality, item.offset, item.num_tokens, item.grid_thw, 1.0,
                media_of(item.media_hash[0])[1] if item.media_hash in hashes else item.patches, item.media_hash,
            )
            for item in request.media
        ]  # fmt: skip
        self.decodes += len(hashes)
        return NewRequest(request.request_id, request.prompt_token_ids, request.sampling, media)


class Everything:
    """Two API servers, two engines, the wires between them, and a clock that the test winds."""

    def __init__(self, chance: random.Random, capacity: int, encoder_tokens: int = 6):
        self.chance = chance
        self.incarnations = iter(range(7, 1000))
        self.capacity = capacity
        self.worlds = [
            World(media=StoredObjects(1 << 30), encoder_cache_tokens=encoder_tokens, max_tokens=12) for _ in range(2)
        ]
        self.segments: dict[int, SegmentInMemory] = {}
        for world in self.worlds:
            world.links.identities.clear()
            world.links.read = lambda handle: self.segments[handle.object.incarnation].read(handle)
        self.apis = [self.start(slot) for slot in range(2)]
        self.ends: Counter[str] = Counter()
        self.names = iter(range(1 << 30))
        self.stalled: set[int] = set()  # engines whose ranks run no step

    def start(self, slot: int) -> ApiServer:
        api = ApiServer(slot, next(self.incarnations), len(self.worlds), self.capacity)
        self.segments[api.incarnation] = api.segment
        return api

    def ask(self, api: ApiServer, values: list[int], engine: int | None = None) -> str:
        name = f"r{next(self.names)}"
        chosen = api.engines[self.chance.randrange(len(api.engines)) if engine is None else engine]
        api.ask(name, chosen, values)
        return name

    def kill(self, slot: int) -> None:
        """SIGKILL: what it had sent may arrive yet; the engines are told; a successor starts."""
        dead = self.apis[slot]
        for task in [*dead.receiving, *dead.requests.values()]:
            task.cancel()
        for world, wire in zip(self.worlds, dead.wires, strict=True):
            for frame in list(wire.sent)[: self.chance.randint(0, len(wire.sent))]:
                self.deliver(world, frame)
            world.receive(PeerGone(dead.name, dead.incarnation), ("supervisor", 0))
        self.apis[slot] = self.start(slot)

    def deliver(self, world: World, frame: bytes) -> None:
        envelope = decode(frame)
        world.links.identities[envelope.incarnation] = sockets.identity(envelope.sender, envelope.incarnation)
        world.links.inbox.append(envelope)
        if isinstance(envelope.body, NewRequest):
            handles = [item.patches for item in envelope.body.media if isinstance(item.patches, TensorHandle)]
            for message in {handle.message for handle in handles}:
                world.links.inbox.append(Envelope("worker 0.0 media", 100, MediaReady(0, message)))

    def run_engine(self, number: int) -> None:
        """One turn of a core; what it says goes onto the wires."""
        world = self.worlds[number]
        world.core.turn()
        for peer, body in world.links.sent:
            for api in self.apis:
                if peer == sockets.identity(api.name, api.incarnation):
                    api.wires[number].on_the_way.append(Encoder(f"core {number}", 2).encode(body))
        world.links.sent.clear()

    async def tick(self, pace: float) -> None:
        """Everything that could happen happens with probability `pace`."""
        for number, world in enumerate(self.worlds):
            for api in self.apis:
                wire = api.wires[number]
                if wire.sent and self.chance.random() < pace:
                    self.deliver(world, wire.sent.popleft())
                if wire.on_the_way and self.chance.random() < pace:
                    wire.inbox.put_nowait(wire.on_the_way.popleft())
            if world.links.inbox and self.chance.random() < pace:
                self.run_engine(number)
            if world.links.steps and number not in self.stalled and self.chance.random() < pace:
                world.links.run_step()
        for _ in range(4):
            await asyncio.sleep(0)
        for api in self.apis:
            for name in [name for name, task in api.requests.items() if task.done()]:
                task = api.requests.pop(name)
                self.ends["cancelled" if task.cancelled() else task.result()] += 1

    async def settle(self) -> None:
        for _ in range(3000):
            quiet = not any(
                world.links.inbox or world.links.steps or world.core.steps.in_flight for world in self.worlds
            ) and not any(
                api.requests or any(wire.sent or wire.on_the_way or not wire.inbox.empty() for wire in api.wires)
                for api in self.apis
            )
            if quiet:
                return
            await self.tick(1.0)
        raise AssertionError("it does not come to rest")

    def assert_at_rest(self) -> None:
        for world in self.worlds:
            core, media = world.core, world.core.media
            assert not core.requests and not core.steps.in_flight and not core.steps.unreferenced
            assert media.num_references == 0 == media.num_bytes_pinned and media.idle.size == media.num_bytes
            living = {api.incarnation: api.store for api in self.apis}
            for key, entry in media._entries.items():
                assert entry.listed, "an object that nobody wants is still there"
                assert key.incarnation in living, "an object of a dead API server is listed"
                assert key.number in living[key.incarnation]._objects, "an object that was freed is listed"
            dead = set(self.segments) - set(living)
            assert set(world.links.dropped_segments) == dead, "a dead API server's segment is mapped"
        for api in self.apis:
            assert not any(stored.pins or stored.asked for stored in api.store._objects.values())
            assert not any(transport.held for transport in api.transports)
            objects = {stored.handle.object for stored in api.store._objects.values()}
            assert objects == set(api.segment.offsets), "memory that no object has"
            for number, engine in enumerate(api.engines):
                listed = {media.media_hash for media in self.worlds[number].core.media.all_listed()}
                assert set(engine.media._items) == listed, "a copy of the directory differs"

    async def grown(self) -> None:
        """Let the segments have all the memory that they will get."""
        for api in self.apis:
            await api.segment.grow(1)
            api.store._refused = 0  # as the first item to find no room would show

    async def empty(self) -> None:
        """Have both owners free all they have: nothing may be in the way."""
        for api in self.apis:
            api.store._make_room(api.segment.allocator.capacity)
        await self.settle()
        for api in self.apis:
            assert not api.store._objects and api.segment.allocator.used_bytes == 0
        self.assert_at_rest()

    def close(self) -> None:
        for api in self.apis:
            for task in api.receiving:
                task.cancel()


def play(scenario: Callable[[Everything], Any], chance: random.Random | None = None, **more: Any) -> None:
    async def run() -> None:
        everything = Everything(chance or random.Random(1), **{"capacity": 12 * BYTES, **more})
        try:
            await scenario(everything)
            await everything.settle()
            everything.assert_at_rest()
        finally:
            everything.close()

    asyncio.run(run())


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(2, 16),
    pace=st.sampled_from([0.2, 0.5, 0.9]),
    kills=st.booleans(),
)
def test_no_rank_reads_what_was_freed_and_all_comes_back(seed, capacity, pace, kills):
    chance = random.Random(seed)

    async def scenario(everything: Everything) -> None:
        asked = 0
        for turn in range(150):
            if chance.random() < 0.5:
                asked += 1
                everything.ask(chance.choice(everything.apis), chance.choices(range(1, 9), k=chance.randint(1, 2)))
            if chance.random() < 0.1:
                api = chance.choice(everything.apis)
                if api.requests:
                    chance.choice(list(api.requests.values())).cancel()
            if chance.random() < 0.03:
                everything.worlds[chance.randrange(2)].receive(
                    ResetCaches(turn), ("api 0", everything.apis[0].incarnation)
                )
            if kills and chance.random() < 0.02:
                everything.kill(chance.randrange(2))
            await everything.tick(pace)
        await everything.settle()
        assert everything.ends["length"] > 0 and set(everything.ends) <= {"length", "cancelled"}
        everything.assert_at_rest()
        await everything.empty()

    play(scenario, chance, capacity=capacity * BYTES)


async def stored(everything: Everything, api: int, value: int, engine: int = 0) -> None:
    """A request with this medium, to its end."""
    everything.ask(everything.apis[api], [value], engine)
    await everything.settle()


def objects(everything: Everything, api: int = 0) -> list[int]:
    """Which media lie in a segment, by what makes them; the longest unused first."""
    return [one.media.media_hash[0] for one in everything.apis[api].store._objects.values()]


def test_what_one_api_server_stored_is_a_hit_for_the_other_at_every_engine():
    async def scenario(everything: Everything) -> None:
        await stored(everything, 0, 1)
        for engine in (0, 1):
            await stored(everything, 1, 1, engine)
        assert everything.ends == {"length": 3}
        assert [api.decodes for api in everything.apis] == [1, 0] and objects(everything, 1) == []

    play(scenario)


def test_the_same_video_at_two_api_servers_at_once_is_stored_once_in_the_end():
    async def scenario(everything: Everything) -> None:
        everything.ask(everything.apis[0], [1], 0)
        everything.ask(everything.apis[1], [1], 1)
        await everything.settle()
        assert [api.decodes for api in everything.apis] == [1, 1] and everything.ends == {"length": 2}
        assert (objects(everything, 0), objects(everything, 1)) == ([1], [])
        await stored(everything, 1, 1, 0)
        assert everything.apis[1].decodes == 1

    play(scenario)


def test_use_by_others_counts_for_the_order_of_eviction():
    async def scenario(everything: Everything) -> None:
        await everything.grown()
        for value in (2, 5, 8):  # of three tokens each; the segment holds four, and keeps room for one
            await stored(everything, 0, value)
        await stored(everything, 1, 2)
        await stored(everything, 0, 11)
        assert objects(everything) == [8, 2, 11]
        assert [world.figures().counters.media_evictions for world in everything.worlds] == [1, 1]

    play(scenario, capacity=12 * BYTES + SLACK)


def test_what_an_engine_refers_to_is_busy_and_the_next_goes():
    async def scenario(everything: Everything) -> None:
        await everything.grown()
        for value in (2, 5):  # of three tokens each; there is room for one more, and room for one is kept
            await stored(everything, 0, value)
        api, world = everything.apis[0], everything.worlds[0]
        everything.stalled.add(0)
        everything.ask(api, [2], 0)
        while not world.core.media.num_references or not world.links.steps:
            await everything.tick(1.0)
        api.store._objects.move_to_end(next(iter(api.store._objects)), last=False)  # as if it ran for long
        everything.ask(api, [8], 1)
        while everything.ends["length"] < 3:
            await everything.tick(1.0)
        assert objects(everything) == [2, 8]
        assert world.core.media.num_references == 1  # no step was run meanwhile
        everything.stalled.clear()
        await everything.settle()
        assert everything.ends == {"length": 4}

    play(scenario, capacity=9 * BYTES + SLACK)


def test_a_dead_api_servers_segment_stays_mapped_for_those_who_read_it():
    async def scenario(everything: Everything) -> None:
        await stored(everything, 0, 1)
        world = everything.worlds[0]
        dead = everything.apis[0].incarnation
        everything.stalled.add(0)
        everything.ask(everything.apis[1], [1], 0)
        while not world.core.media.num_references:
            await everything.tick(1.0)
        everything.kill(0)
        for _ in range(5):
            await everything.tick(1.0)
        assert world.core.media.all_listed() == [] and world.core.media.num_references == 1
        assert world.links.dropped_segments == [] and everything.worlds[1].links.dropped_segments == [dead]
        everything.stalled.clear()
        await everything.settle()
        assert everything.ends == {"length": 2} and world.links.dropped_segments == [dead]
        await stored(everything, 0, 1)
        assert objects(everything) == [1]

    play(scenario)


@pytest.mark.parametrize(("values", "reason"), [([2, 5, 8, 11], "store_full"), ([2], "store_oversize")])
def test_what_finds_no_place_travels_by_itself_and_is_counted(values: list[int], reason: str):
    before = metric("ipc_fallbacks_total", reason=reason)

    async def scenario(everything: Everything) -> None:
        api = everything.apis[0]
        if reason == "store_oversize":
            api.store._max_object_bytes = BYTES
        everything.ask(api, values, 0)  # all of them pinned at once
        await everything.settle()
        assert everything.ends == {"length": 1} and len(api.transports[0].sent) == 1
        assert objects(everything) == values[:-1]
        assert metric("ipc_fallbacks_total", reason=reason) == before + 1
        await stored(everything, 0, 3)
        assert objects(everything)[-1] == 3  # the cache goes on

    play(scenario, capacity=10 * BYTES + SLACK, encoder_tokens=12)


def test_a_reset_makes_everything_cold():
    async def scenario(everything: Everything) -> None:
        for value in (1, 2, 3):
            await stored(everything, 0, value)
        for world in everything.worlds:
            world.receive(ResetCaches(1), ("api 1", everything.apis[1].incarnation))
        await everything.settle()
        assert objects(everything) == [] and everything.apis[0].segment.allocator.used_bytes == 0
        await stored(everything, 1, 1)
        assert everything.apis[1].decodes == 1

    play(scenario)


def test_a_request_that_is_refused_after_its_media_were_stored_leaves_them_cached_and_unreferenced():
    async def scenario(everything: Everything) -> None:
        api = everything.apis[0]
        media_hash, patches, count = media_of(1)
        item = MediaItem("video", 0, count, (1, 2, 2 * count), 1.0, patches, media_hash)
        request = NewRequest("bad", [20] * 8, SamplingParams(max_tokens=3, seed=1), [item])  # no placeholders there
        refused = asyncio.create_task(api.engines[0].submit(request, api._refill))
        while not refused.done():
            await everything.tick(1.0)
        with pytest.raises(EngineError):
            with refused.result() as generation:
                await anext(generation)
        await everything.settle()
        everything.assert_at_rest()
        await stored(everything, 1, 1)
        assert everything.apis[1].decodes == 0 and objects(everything) == [1]

    play(scenario)
