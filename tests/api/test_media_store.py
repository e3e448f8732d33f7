"""`MediaStoreClient` with a real store: requests share writes, and one that leaves releases its references."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch

from mini_engine.api.errors import EngineError
from mini_engine.api.media_store import INLINE_COPY_BYTES, SHM_STORE, MediaStoreClient
from mini_engine.core.media_store import MediaDirectory, MediaStore, RankCopies
from mini_engine.messages import (
    Abandoned,
    AnyMessage,
    CachedMedia,
    Found,
    Lookup,
    MediaItem,
    MessageId,
    NewRequest,
    Reserve,
    SamplingParams,
    StoreHandle,
    TensorHandle,
    Unreserve,
    Written,
)
from mini_engine.transport.arena import ReadableMemory, WritableMemory
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.memory import create_sparse
from mini_engine.transport.pages import PAGE_BYTES, Extent
from tests.api.patience import PATIENCE
from tests.api.peers import eventually
from tests.api.test_app import metric

PAGES = 256
LARGE = INLINE_COPY_BYTES // PAGE_BYTES + 2  # pages of an item that is copied in a thread
A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))
GONE = EngineError("gone")


def item(value: bytes, pages: int = 1, **more: Any) -> MediaItem:
    """Its patches are the first byte of its hash."""
    patches = torch.full((pages, PAGE_BYTES), value[0], dtype=torch.uint8)
    return MediaItem("video", 0, 1, (pages, 1, 1), 1.0, patches, value, **more)


class HeldMemory(WritableMemory):
    """Its writes wait for `go`; while `fails`, there is no memory for them."""

    def __init__(self, fd: int):
        super().__init__(fd)
        self.go = threading.Event()
        self.go.set()
        self.begun = 0
        self.fails = False

    def write(self, extents: Sequence[Extent], payload: torch.Tensor) -> None:
        self.begun += 1
        assert self.go.wait(PATIENCE)
        if self.fails:
            raise OSError("no memory")
        super().write(extents, payload)


class Core:
    """A media directory, and the messages of API servers to it, encoded and decoded; `held` are not handled yet."""

    def __init__(self, media: MediaDirectory):
        self.media = media
        self.clients: dict[int, MediaStoreClient] = {}
        self.holds: tuple[type, ...] = ()
        self.held: list[tuple[int, AnyMessage]] = []
        self.claimed: dict[tuple[int, str], Any] = {}  # references of requests that have come
        self.seen: list[AnyMessage] = []
        self.dead = False

    def sender(self, incarnation: int) -> Callable[[AnyMessage], None]:
        encoder = Encoder(f"api {incarnation}", incarnation)

        def send(body: AnyMessage) -> None:
            if self.dead:
                raise GONE
            body = decode(encoder.encode(body)).body
            self.seen.append(body)
            if self.held or isinstance(body, self.holds):  # in order
                self.held.append((incarnation, body))
            else:
                asyncio.get_running_loop().call_soon(self.handle, incarnation, body)

        return send

    def let_go(self) -> None:
        self.holds, held, self.held = (), self.held, []
        for incarnation, body in held:
            self.handle(incarnation, body)

    def handle(self, incarnation: int, body: AnyMessage) -> None:
        media = self.media
        match body:
            case Lookup(request_id=request_id, hashes=hashes):
                self.answer(incarnation, Found(request_id, media.look_up((incarnation, request_id), hashes)))
            case NewRequest(request_id=request_id):
                self.claimed[incarnation, request_id] = media.claim((incarnation, request_id))
            case Unreserve(request_id=request_id):
                media.release_request((incarnation, request_id))
            case Reserve(request_id=request_id, media=facts):
                self.answer(incarnation, media.reserve((incarnation, request_id), facts))  # type: ignore[attr-defined]
            case Written(number=number, request_ids=request_ids):
                media.written(number, [(incarnation, one) for one in request_ids])  # type: ignore[attr-defined]
            case Abandoned(number=number):
                media.abandoned(number)  # type: ignore[attr-defined]

    def answer(self, incarnation: int, body: AnyMessage) -> None:
        client, body = self.clients[incarnation], decode(Encoder("core 0", 2).encode(body)).body
        if not self.dead:
            client.on_found(body) if isinstance(body, Found) else client.on_reserved(body)  # type: ignore[arg-type]

    def count(self, kind: type) -> int:
        return sum(isinstance(body, kind) for body in self.seen)


class World:
    """Two API servers with clients of one engine, which have two ranks."""

    def __init__(self, pages: int = PAGES, max_object_bytes: int = 1 << 30):
        self.store = MediaStore(pages * PAGE_BYTES, PAGE_BYTES, lambda: 1 << 50)
        self.core = Core(self.store)
        fd = create_sparse(pages * PAGE_BYTES)
        self.memory, self.readable = HeldMemory(fd), ReadableMemory(fd)
        os.close(fd)
        for number in (1, 2):
            self.core.clients[number] = MediaStoreClient(
                0, self.core.sender(number), 2, True, self.memory, max_object_bytes
            )
        self.client, self.other = self.core.clients.values()

    async def ask(self, name: str, items: Collection[MediaItem], client: MediaStoreClient | None = None) -> NewRequest:
        """A request's way: look up, bring what is absent, place it, and hand it over."""
        client = client or self.client
        with client.holding(name):
            found = await client.look_up(name, [one.media_hash for one in items])
            assert all(isinstance(one, CachedMedia) for one in found.values())
            media = [one if one.media_hash not in found else named(one) for one in items]
            placed = await client.place(NewRequest(name, [1], SamplingParams(1, 1), media))
            self.core.sender(1 if client is self.client else 2)(only_named(placed))
        with contextlib.suppress(asyncio.CancelledError):  # too late: it is sent
            await asyncio.sleep(0)
        return placed

    def read(self, placed: NewRequest, incarnation: int = 1) -> list[str]:
        """What the engine's ranks find, and what came with a tensor; the request ends."""
        references = self.core.claimed.pop((incarnation, placed.request_id))
        seen = []
        for one in self.store.resolve(only_named(placed), references).media:
            assert isinstance(one.patches, StoreHandle)
            rows = self.readable.rows(one.patches.extents, one.patches.shape, "uint8", 0, one.patches.shape[0])
            assert set(rows.view(-1).tolist()) == {one.media_hash[0]}, "another item's bytes"
            seen.append("stored")
        self.store.release(references)
        return seen + ["brought" for one in placed.media if one.patches is not None]

    async def at_rest(self) -> None:
        """All that was begun has ended, and nothing is held for it."""
        await eventually(lambda: not self.core.held and self.store.num_reservations == 0)
        await asyncio.sleep(0.01)
        assert self.store.num_references == 0 == self.store.num_bytes_pinned
        assert self.store.pages.num_used * PAGE_BYTES == self.store.num_bytes_idle


def named(one: MediaItem) -> MediaItem:
    return MediaItem(one.modality, 0, 1, one.grid_thw, 1.0, None, one.media_hash)


def only_named(placed: NewRequest) -> NewRequest:
    return NewRequest(placed.request_id, [1], placed.sampling, [one for one in placed.media if one.patches is None])


def play(scenario: Callable[[World], Any], **more: Any) -> None:
    async def run() -> None:
        world = World(**more)
        await scenario(world)
        await world.at_rest()

    asyncio.run(run())


def fallbacks(reason: str) -> float:
    return metric("ipc_fallbacks_total", reason=reason)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("pages", [1, LARGE])
def test_what_one_request_has_stored_others_find(pages: int) -> None:
    async def scenario(world: World) -> None:
        figures = ("mm_cache_queries_total", "mm_cache_hits_total")
        before = [metric(name, engine="0") for name in figures]
        sent = [metric(f"ipc_{name}_total", transport=SHM_STORE) for name in ("messages", "bytes")]
        first = await world.ask("first", [item(A, pages)])
        await eventually(lambda: world.store.num_references == 1)
        again = await world.ask("again", [item(A, pages), item(B)])
        through_another = await world.ask("elsewhere", [item(A, pages)], world.other)
        await eventually(lambda: world.store.num_references == 4)
        assert world.core.count(Written) == 2
        assert world.read(first) == ["stored"] and world.read(again) == ["stored"] * 2
        assert world.read(through_another, 2) == ["stored"]
        after = [metric(name, engine="0") for name in figures]
        assert [now - then for now, then in zip(after, before, strict=True)] == [4, 2]
        now = [metric(f"ipc_{name}_total", transport=SHM_STORE) for name in ("messages", "bytes")]
        assert [now[0] - sent[0], now[1] - sent[1]] == [2 * 2, 2 * (pages + 1) * PAGE_BYTES]

    play(scenario)


def test_requests_of_one_api_server_join_one_write() -> None:
    async def scenario(world: World) -> None:
        world.memory.go.clear()
        asking = [asyncio.create_task(world.ask(f"r{number}", [item(A, LARGE)])) for number in range(3)]
        await eventually(lambda: world.memory.begun == 1)
        late = asyncio.create_task(world.ask("late", [item(A, LARGE)]))
        await asyncio.sleep(0.01)
        world.memory.go.set()
        for placed in await asyncio.gather(*asking, late):
            await eventually(lambda: world.core.count(Written) == 1)
            await asyncio.sleep(0)
            assert world.read(placed) == ["stored"]
        assert world.core.count(Reserve) == 1 == world.memory.begun

    play(scenario)


def test_the_second_of_two_api_servers_sends_its_item_uncached() -> None:
    async def scenario(world: World) -> None:
        before = fallbacks("store_busy")
        world.memory.go.clear()
        first = asyncio.create_task(world.ask("first", [item(A, LARGE)]))
        await eventually(lambda: world.memory.begun == 1)
        second = await world.ask("second", [item(A, LARGE)], world.other)
        world.memory.go.set()
        assert world.read(second, 2) == ["brought"] and fallbacks("store_busy") == before + 1
        placed = await first
        await eventually(lambda: world.store.num_references == 1)
        assert world.read(placed) == ["stored"]

    play(scenario)


def test_what_came_between_look_up_and_reservation_is_not_written_again() -> None:
    async def scenario(world: World) -> None:
        world.core.holds = (Reserve,)
        asking = [asyncio.create_task(world.ask(f"r{number}", [item(A)])) for number in range(3)]
        await eventually(lambda: len(world.core.held) == 1)
        reserved = world.store.reserve((2, "elsewhere"), CachedMedia.of(item(A)))
        world.memory.write(reserved.extents, item(A).patches.view(-1))
        world.store.written(reserved.number, [])
        world.core.let_go()
        placed = await asyncio.gather(*asking)
        assert [world.read(each) for each in placed] == [["stored"]] * 3
        assert world.core.count(Written) == 0 and world.core.count(Reserve) == 3

    play(scenario)


def test_a_full_store_an_item_too_large_and_items_that_are_not_cached_are_sent_with_their_tensors() -> None:
    async def scenario(world: World) -> None:
        before = [fallbacks(f"store_{reason}") for reason in ("full", "oversize", "busy")]
        media = [item(A, 2), item(B, 3), item(C, 2), item(b"d" * 16, cacheable=False)]
        placed = await world.ask("asks", media)
        assert [one.patches is None for one in placed.media] == [True, False, False, False]
        after = [fallbacks(f"store_{reason}") for reason in ("full", "oversize", "busy")]
        assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 0]
        await eventually(lambda: world.store.num_references == 1)
        assert world.read(placed) == ["stored", "brought", "brought", "brought"]

    play(scenario, pages=3, max_object_bytes=2 * PAGE_BYTES)


def test_one_item_twice_in_a_request_is_written_once() -> None:
    async def scenario(world: World) -> None:
        placed = await world.ask("asks", [item(A), item(A)])
        assert world.core.count(Reserve) == 1 and [one.patches for one in placed.media] == [None, None]
        await eventually(lambda: world.store.num_references == 1)
        assert world.read(placed) == ["stored", "stored"]

    play(scenario)


def test_an_item_in_several_extents_is_counted() -> None:
    async def scenario(world: World) -> None:
        before = metric("mm_store_fragmented_total")
        held = [await world.ask(f"r{number}", [item(bytes([number]) * 16)]) for number in range(10, 14)]
        await eventually(lambda: world.store.num_references == 4)
        for placed in held[::2]:
            assert world.read(placed) == ["stored"]
        placed = await world.ask("in pieces", [item(A, 2)])
        await eventually(lambda: world.store.num_references == 3)
        assert world.read(placed) == ["stored"] and metric("mm_store_fragmented_total") == before + 1
        for placed in held[1::2]:
            world.read(placed)

    play(scenario, pages=4)


def test_pages_without_memory_abandon_the_reservation() -> None:
    async def scenario(world: World) -> None:
        world.memory.fails = True
        assert world.read(await world.ask("asks", [item(A)])) == ["brought"]
        await eventually(lambda: world.core.count(Abandoned) == 1)
        world.memory.fails = False
        placed = await world.ask("again", [item(A)])
        await eventually(lambda: world.store.num_references == 1)
        assert world.read(placed) == ["stored"]

    play(scenario)


# --- requests that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("held", [Lookup, Reserve])
def test_a_request_that_leaves_while_it_waits_for_an_answer(held: type, is_cached: bool) -> None:
    async def scenario(world: World) -> None:
        if is_cached:
            world.read(await world.ask("before", [item(B)]))
            await asyncio.sleep(0.01)
            world.store.release(world.store.claim((1, "before")))
        world.core.holds = (held,)
        asking = asyncio.create_task(world.ask("leaves", [item(B), item(A)]))
        await eventually(lambda: bool(world.core.held))
        await cancelled(asking)
        world.core.let_go()
        await eventually(lambda: world.store.num_reservations == 0)
        assert world.memory.begun == is_cached, "nobody waits for it: it is not written"

    play(scenario)


@pytest.mark.parametrize("stays", [False, True])
def test_a_request_that_leaves_while_a_thread_copies(stays: bool) -> None:
    """The pages are the thread's until it has returned; then the item is cached, whoever has left."""

    async def scenario(world: World) -> None:
        world.memory.go.clear()
        leaving = asyncio.create_task(world.ask("leaves", [item(A, LARGE)]))
        await eventually(lambda: world.memory.begun == 1)
        staying = asyncio.create_task(world.ask("stays", [item(A, LARGE)])) if stays else None
        await asyncio.sleep(0.01)
        await cancelled(leaving)
        await asyncio.sleep(0.01)
        assert world.store.num_reservations == 1 and world.core.count(Written) == 0
        world.memory.go.set()
        await eventually(lambda: world.core.count(Written) == 1)
        if staying is not None:
            placed = await staying
            await eventually(lambda: world.store.num_references == 1)
            assert world.read(placed) == ["stored"]
        later = await world.ask("later", [item(A, LARGE)])
        assert world.read(later) == ["stored"] and world.memory.begun == 1

    play(scenario)


@pytest.mark.parametrize("delay", range(12))
def test_a_request_that_leaves_after_so_many_turns_of_the_loop(delay: int) -> None:
    async def scenario(world: World) -> None:
        asking = asyncio.create_task(world.ask("leaves", [item(A), item(B)]))
        for _ in range(delay):
            await asyncio.sleep(0)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            placed = await asking
            await asyncio.sleep(0.01)
            world.read(placed)

    play(scenario)


def test_a_request_that_is_turned_down_keeps_its_references_until_it_leaves() -> None:
    async def scenario(world: World) -> None:
        with world.client.holding("asks"):
            await world.client.look_up("asks", [A])
            placed = await world.client.place(NewRequest("asks", [1], SamplingParams(1, 1), [item(A)]))
            claimed = world.store.claim((1, "asks"))
            assert world.store.resolve(placed, claimed).media[0].patches is not None
            world.store.hand_back((1, "asks"), claimed)
            assert world.store.num_references == 1
        await eventually(lambda: world.core.count(Unreserve) == 1)

    play(scenario)


# --- an engine that dies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [Lookup, Reserve, Written])
def test_a_dead_engine_ends_requests_that_wait_for_its_answer(held: type) -> None:
    async def scenario() -> None:
        world = World()
        world.core.holds = (held,)
        if held is Written:  # while a thread copies
            world.memory.go.clear()
        asking = [asyncio.create_task(world.ask(name, [item(A, LARGE)])) for name in ("one", "two")]
        await eventually(lambda: world.memory.begun == 1 if held is Written else bool(world.core.held))
        world.core.dead = True
        world.client.close(GONE)
        world.memory.go.set()
        for task in asking:
            with pytest.raises(EngineError):
                await task
        with pytest.raises(EngineError):
            await world.ask("late", [item(B)])

    asyncio.run(scenario())


# --- other types of cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cached", [False, True])
def test_without_a_store_nothing_is_reserved_and_without_a_cache_nothing_is_asked(is_cached: bool) -> None:
    async def scenario() -> None:
        copies = RankCopies(1 << 30)
        core = Core(copies)
        client = core.clients[1] = MediaStoreClient(0, core.sender(1), 2, is_cached, None, 1 << 30)
        handle = TensorHandle(MessageId(1, 1), (1, PAGE_BYTES), "uint8")
        copies.arrived(MediaItem("video", 0, 1, (1, 1, 1), 1.0, handle, A))
        copies.kept(A)
        with client.holding("asks"):
            found = await client.look_up("asks", [A, B])
            assert list(found) == [A] * is_cached
            assert await client.look_up("asks", []) == {}
            request = NewRequest("asks", [1], SamplingParams(1, 1), [item(B)])
            assert await client.place(request) is request
        await asyncio.sleep(0.01)
        assert [type(body) for body in core.seen] == [Lookup, Unreserve] * is_cached
        assert copies.num_references == 0

    asyncio.run(scenario())
