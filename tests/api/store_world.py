"""API servers with real stores, and engines, without sockets, memory or ranks: the world of `test_media_votes.py`.

A wire delivers in order, when the test says so; ranks look at what they read when they run a step, which may be long
after it was dispatched.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import zmq
from mini_engine.transport.allocator import Allocator

from mini_engine.api.engine import Engine, Surroundings
from mini_engine.api.media_store import MediaStore
from mini_engine.core.stored_media import StoredObjects
from mini_engine.messages import (
    CachedMedia,
    Envelope,
    MediaItem,
    MediaReady,
    NewRequest,
    PeerGone,
    SamplingParams,
    StoreHandle,
    StoreObject,
    TensorHandle,
)
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode
from tests.api.peers import MemoryTransport
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
        around = Surroundings(self.encoder, numbers, 1, 1 << 30, self.store, lambda: None, lambda: None)
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
        generation = await engine.submit(request, self._refill)
        try:
            async for new in generation:
                if new.finish_reason:
                    return new.finish_reason
        finally:
            generation.abort()
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
            World(media=StoredObjects(), encoder_cache_tokens=encoder_tokens, max_tokens=12) for _ in range(2)
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
