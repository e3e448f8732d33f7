"""`MediaStoreClient` with a real store: an item is written once, and one that leaves releases its references."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from mini_engine.core.caches.encoder_cache import EncoderCache
from mini_engine.core.caches.media_store import MediaStore
from mini_engine.core.engine_core import EngineCore
from mini_engine.core.step_builder import StepBuilder
from mini_engine.engine_client.media_store_client import INLINE_COPY_BYTES, SHM_STORE, CacheAccess, MediaStoreClient
from mini_engine.messages import (
    AnyMessage,
    Envelope,
    Finish,
    Lookup,
    MediaItem,
    NewRequest,
    Reserve,
    SamplingParams,
    StoreHandle,
    Written,
)
from mini_engine.protocol.api_errors import EngineError
from mini_engine.transport.arena import ReadableMemory, WritableMemory
from mini_engine.transport.pages import PAGE_BYTES, Extent
from mini_engine.transport.shared_memory import create_sparse
from tests.support.patience import PATIENCE, cancelled, eventually, settle
from tests.support.serving import Counted

PAGES = 64
LARGE = INLINE_COPY_BYTES // PAGE_BYTES + 2  # pages of an item that is copied in a thread
A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


def item(media_hash: bytes, pages: int = 1, **more: Any) -> MediaItem:
    """Its patches are the first byte of its hash."""
    patches = torch.full((pages, PAGE_BYTES), media_hash[0], dtype=torch.uint8)
    return MediaItem(media_hash, "video", 1, (pages, 1, 1), 1.0, offsets=[0], patches=patches, **more)


class HeldMemory(WritableMemory):
    """Its writes wait for `go`."""

    def __init__(self, fd: int):
        super().__init__(fd)
        self.go = threading.Event()
        self.go.set()
        self.begun = 0

    def write(self, extents: Sequence[Extent], payload: torch.Tensor) -> None:
        self.begun += 1
        assert self.go.wait(PATIENCE)
        super().write(extents, payload)


class EngineStore:
    """The store of one engine with two ranks, and the client in an API server. Messages of type `holds`, and those
    after them, are held."""

    def __init__(self) -> None:
        self.store = MediaStore(PAGES * PAGE_BYTES, PAGE_BYTES, lambda: 1 << 50)
        fd = create_sparse(PAGES * PAGE_BYTES)
        self.memory, self.readable = HeldMemory(fd), ReadableMemory(fd)
        os.close(fd)
        self.client = MediaStoreClient(0, self.send, 2, CacheAccess(1 << 30, self.memory, 32 * PAGE_BYTES))
        self.holds: type | None = None
        self.held: list[AnyMessage] = []
        self.seen: list[type] = []
        self.claimed: dict[str, Any] = {}  # references of requests that the engine has
        self.dead = False

    def send(self, body: AnyMessage) -> None:
        if self.dead:
            raise EngineError("gone")
        self.seen.append(type(body))
        if self.held or isinstance(body, self.holds or ()):
            self.held.append(body)
        else:
            asyncio.get_running_loop().call_soon(self.deliver, body)

    def deliver(self, body: AnyMessage) -> None:
        if self.dead:
            return
        match body:
            case NewRequest(request_id=request_id):
                self.claimed[request_id] = self.store.claim((1, request_id))
            case Finish(request_id=request_id):
                self.store.release_request((1, request_id))
            case _:
                links = SimpleNamespace(send=lambda _, answer: self.client.on_answer(answer))
                core: Any = SimpleNamespace(media=self.store, links=links, encoder=EncoderCache(0, StepBuilder()))
                EngineCore._handle_media(core, Envelope(1, body))

    async def ask(self, name: str, *media: MediaItem) -> NewRequest:
        """A request's path: look up, bring what is absent, place it, and hand it over."""
        try:
            found = await self.client.look_up(name, [each.media_hash for each in media])
            items = [replace(each, patches=None) if each.media_hash in found else each for each in media]
            placed = await self.client.place(NewRequest(name, [1], SamplingParams(1, 1), items))
            self.send(placed)
        except BaseException:
            self.client.release_aborted(name)
            raise
        return placed

    def asking(self, name: str, *media: MediaItem) -> asyncio.Task[NewRequest]:
        return asyncio.create_task(self.ask(name, *media))

    async def read(self, placed: NewRequest) -> list[str]:
        """For each item, whether the ranks find it in the store, or it came with its tensor. The request ends."""
        await eventually(lambda: placed.request_id in self.claimed)
        references = self.claimed.pop(placed.request_id)
        for each in placed.media:
            if each.patches is None:
                handle = references[each.media_hash].patches
                assert isinstance(handle, StoreHandle)
                rows = self.readable.rows(handle.extents, handle.shape, 0, handle.shape[0])
                assert set(rows.view(-1).tolist()) == {each.media_hash[0]}, "another item's bytes"
        self.store.release(references)
        return ["stored" if each.patches is None else "brought" for each in placed.media]


@pytest.fixture
async def world() -> AsyncIterator[EngineStore]:
    """At its end all that was begun has ended, and nothing is held for it."""
    world = EngineStore()
    yield world
    if not world.dead:
        await settle()
        assert not world.held and not world.store.reservations
        assert world.store.num_references == 0 == world.store.num_bytes_pinned
        assert world.store.pages.num_used * PAGE_BYTES == world.store.num_bytes_idle


@pytest.mark.parametrize("pages", [1, LARGE])
async def test_stored_item_is_found_by_other_requests(world: EngineStore, pages: int) -> None:
    sent = Counted(f"ipc_messages_total{{transport={SHM_STORE}}}", f"ipc_bytes_total{{transport={SHM_STORE}}}")
    first = await world.ask("first", item(A, pages), item(A, pages))
    again = await world.ask("again", item(A, pages), item(B))
    assert await world.read(first) == await world.read(again) == ["stored"] * 2
    assert world.seen.count(Written) == 2 == world.seen.count(Reserve)
    assert sent.since() == [2 * 2, 2 * (pages + 1) * PAGE_BYTES]


@pytest.mark.parametrize("is_written", [False, True])
async def test_item_that_another_api_server_writes_or_has_written_since_the_look_up(
    world: EngineStore, is_written: bool
) -> None:
    counted = Counted("ipc_fallbacks_total{reason=store_busy}")
    world.holds = Reserve
    asking = world.asking("asks", item(A))
    await eventually(lambda: bool(world.held))
    (reserve,), world.held, world.holds = world.held, [], None
    granted = world.store.reserve((2, "other"), reserve.media)
    if is_written:
        world.memory.write(granted.extents, item(A).patches)
        world.store.written(A, [])
    world.deliver(reserve)
    placed = await asking
    assert (await world.read(placed), counted.since()) == ((["stored"], [0]) if is_written else (["brought"], [1]))
    if not is_written:
        world.store.abandoned(A)


async def test_items_that_the_store_does_not_take_are_sent_with_their_tensors(world: EngineStore) -> None:
    counted = Counted(*(f"ipc_fallbacks_total{{reason=store_{reason}}}" for reason in ("full", "oversize", "busy")))
    held = [await world.ask(f"r{number}", item(bytes([number]) * 16, 31)) for number in (8, 9)]
    placed = await world.ask("asks", item(A, 2), item(B, 33), item(C, 3), item(b"d" * 16, cacheable=False))
    assert await world.read(placed) == ["stored", "brought", "brought", "brought"]
    assert counted.since() == [1, 1, 0]
    for request in held:
        await world.read(request)


# --- requests that leave, and an engine that dies --------------------------------------------------------------------


@pytest.mark.parametrize("stays", [False, True])
async def test_request_that_leaves_while_a_thread_copies(world: EngineStore, stays: bool) -> None:
    """The pages are the thread's until it has returned; then the item is cached, whichever request has left."""
    world.memory.go.clear()
    leaving = world.asking("leaves", item(A, LARGE))
    await eventually(lambda: world.memory.begun == 1)
    staying = world.asking("stays", item(A, LARGE)) if stays else None
    await settle()
    await cancelled(leaving)
    assert len(world.store.reservations) == 1 and Written not in world.seen
    world.memory.go.set()
    await eventually(lambda: world.seen.count(Written) == 1)
    if staying is not None:  # it has waited for the write
        assert await world.read(await staying) == ["stored"]
    assert world.seen.count(Reserve) == 1 + stays
    assert await world.read(await world.ask("later", item(A, LARGE))) == ["stored"] and world.memory.begun == 1


@pytest.mark.parametrize("turns", range(12))
async def test_request_that_leaves_after_so_many_turns_of_the_loop(world: EngineStore, turns: int) -> None:
    asking = world.asking("leaves", item(A), item(B))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await world.read(await asking)


@pytest.mark.parametrize("held", [Lookup, Reserve, Written])
async def test_dead_engine_ends_requests_that_wait_for_its_answer(world: EngineStore, held: type) -> None:
    world.holds = held
    if held is Written:  # while a thread copies
        world.memory.go.clear()
    asking = [world.asking(name, item(A, LARGE)) for name in ("one", "two")]
    await eventually(lambda: world.memory.begun == 1 if held is Written else bool(world.held))
    world.dead = True
    world.client.close(EngineError("gone"))
    world.memory.go.set()
    for task in (*asking, world.asking("late", item(B))):
        with pytest.raises(EngineError, match="gone"):
            await task


async def test_nothing_is_asked_without_media_and_nothing_reserved_without_a_store() -> None:
    client = MediaStoreClient(0, pytest.fail, 2, CacheAccess(1 << 30))
    request = NewRequest("asks", [1], SamplingParams(1, 1), [item(B)])
    assert await client.look_up("asks", []) == {} and await client.place(request) is request
