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
from mini_engine.core.pending_steps import NextStep
from mini_engine.engine_client.engines import EngineHandle
from mini_engine.engine_client.media_store_client import INLINE_COPY_BYTES, SHM_STORE, CacheAccess, MediaStoreClient
from mini_engine.messages import (
    Envelope,
    Finish,
    ItemFacts,
    Lookup,
    MediaItem,
    NewRequest,
    RankAddress,
    Reserve,
    Written,
)
from mini_engine.protocol.api_errors import EngineError
from mini_engine.transport.arena import Arena, ReadableMemory, WritableMemory
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.page_allocator import PAGE_BYTES, Extent
from mini_engine.transport.shared_memory import create_sparse
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.support.patience import PATIENCE, cancelled, eventually, settle
from tests.support.serving import Counted

LARGE = INLINE_COPY_BYTES // PAGE_BYTES + 2  # pages of an item that is copied in a thread
A, B = b"a" * 16, b"b" * 16


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
    """The store of one engine with two ranks, and the client in an API server. Messages of type `unanswered` are lost,
    those of others take effect at once; the answer comes in the next turn of the loop."""

    def __init__(self) -> None:
        self.store = MediaStore(64 * PAGE_BYTES, PAGE_BYTES, lambda: 1 << 50)
        fd = create_sparse(64 * PAGE_BYTES)
        self.memory, self.readable = HeldMemory(fd), ReadableMemory(fd)
        os.close(fd)
        encoder = Encoder("api 0", 1)
        queue = TensorIpcSender(encoder, [RankAddress(0, rank, "") for rank in range(2)], Arena(PAGE_BYTES, lambda: 0))
        socket: Any = SimpleNamespace(send=self.send)
        self.handle = EngineHandle(0, socket, encoder, queue, CacheAccess(1 << 30, self.memory, 32 * PAGE_BYTES))
        self.client = self.handle.media_store
        self.unanswered: type | None = None
        self.sent: list[type] = []

    def send(self, frame: bytes, _: int) -> Any:
        body = decode(frame).body
        self.sent.append(type(body))
        if isinstance(body, Finish):
            self.store.release_request((1, body.request_id))
        elif type(body) is not self.unanswered:
            loop = asyncio.get_running_loop()
            links = SimpleNamespace(send=lambda _, answer: loop.call_soon(self.handle._handle, answer))
            core: Any = SimpleNamespace(media=self.store, links=links, encoder=EncoderCache(0, NextStep()))
            EngineCore._handle_media(core, Envelope(1, body))
        return SimpleNamespace(result=lambda: None)

    async def ask(self, name: str, *media: MediaItem) -> NewRequest:
        """A request's path until it is sent: look up, bring what is absent, and place it."""
        try:
            found = await self.client.look_up(name, [each.media_hash for each in media])
            items = [replace(each, patches=None) if each.media_hash in found else each for each in media]
            return await self.client.store_media(NewRequest(name, [1], media=items))
        except BaseException:
            self.client.release_aborted(name)
            raise

    def read(self, placed: NewRequest) -> list[str]:
        """For each item, whether the ranks find it in the store, or it comes with its tensor. The request ends."""
        references = self.store.claim((1, placed.request_id))
        for each in placed.media:
            if each.patches is None:
                handle = references[each.media_hash].patches
                rows = self.readable.rows(handle.extents, handle.shape, 0, handle.shape[0])
                assert set(rows.view(-1).tolist()) == {each.media_hash[0]}, "another item's bytes"
        self.store.release(references)
        return ["stored" if each.patches is None else "brought" for each in placed.media]


@pytest.fixture
async def engine() -> AsyncIterator[EngineStore]:
    """At its end all that was begun has ended, and nothing is held for it."""
    engine = EngineStore()
    yield engine
    if engine.handle.stopped is None:
        await settle()
        assert not engine.store.reservations
        assert engine.store.num_references == 0 == engine.store.num_bytes_pinned
        assert engine.store.pages.num_used * PAGE_BYTES == engine.store.num_bytes_idle


@pytest.mark.parametrize("pages", [1, LARGE])
async def test_stored_item_is_found_by_other_requests(engine: EngineStore, pages: int) -> None:
    counted = Counted(f"ipc_messages_total{{transport={SHM_STORE}}}", f"ipc_bytes_total{{transport={SHM_STORE}}}")
    first = await engine.ask("first", item(A, pages), item(A, pages))
    again = await engine.ask("again", item(A, pages), item(B))
    assert engine.read(first) == engine.read(again) == ["stored"] * 2
    assert engine.sent.count(Written) == 2 == engine.sent.count(Reserve)
    assert counted.since() == [2 * 2, 2 * (pages + 1) * PAGE_BYTES]


@pytest.mark.parametrize("is_written", [False, True])
async def test_item_that_another_api_server_writes_or_has_written_since_the_look_up(
    engine: EngineStore, is_written: bool
) -> None:
    counted = Counted("ipc_fallbacks_total{reason=store_busy}")
    assert await engine.client.look_up("asks", [A]) == {}
    granted = engine.store.reserve((2, "other"), ItemFacts.of(item(A)))
    if is_written:
        engine.memory.write(granted.extents, item(A).patches)
        engine.store.written(A, [])
    placed = await engine.client.store_media(NewRequest("asks", [1], media=[item(A)]))
    assert (engine.read(placed), counted.since()) == ((["stored"], [0]) if is_written else (["brought"], [1]))
    if not is_written:
        engine.store.abandoned(A)


async def test_items_that_the_store_does_not_take_are_sent_with_their_tensors(engine: EngineStore) -> None:
    counted = Counted(*(f"ipc_fallbacks_total{{reason=store_{reason}}}" for reason in ("full", "oversize", "busy")))
    held = [await engine.ask(f"r{number}", item(bytes([number]) * 16, 31)) for number in (8, 9)]
    placed = await engine.ask("asks", item(A, 2), item(B, 33), item(b"c" * 16, 3), item(b"d" * 16, cacheable=False))
    assert engine.read(placed) == ["stored", "brought", "brought", "brought"]
    assert counted.since() == [1, 1, 0]
    for request in held:
        engine.read(request)


# --- requests that leave, and an engine that dies --------------------------------------------------------------------


@pytest.mark.parametrize("stays", [False, True])
async def test_request_that_leaves_while_a_thread_copies(engine: EngineStore, stays: bool) -> None:
    """The pages are the thread's until it has returned; then the item is cached, whichever request has left."""
    engine.memory.go.clear()
    leaving = asyncio.create_task(engine.ask("leaves", item(A, LARGE)))
    await eventually(lambda: engine.memory.begun == 1)
    staying = asyncio.create_task(engine.ask("stays", item(A, LARGE))) if stays else None
    await settle()
    await cancelled(leaving)
    assert len(engine.store.reservations) == 1 and Written not in engine.sent
    engine.memory.go.set()
    await eventually(lambda: engine.sent.count(Written) == 1)
    if staying is not None:  # it has waited for the write
        assert engine.read(await staying) == ["stored"]
    assert engine.sent.count(Reserve) == 1 + stays
    assert engine.read(await engine.ask("later", item(A, LARGE))) == ["stored"] and engine.memory.begun == 1


@pytest.mark.parametrize("turns", range(12))
async def test_request_that_leaves_after_so_many_turns_of_the_loop(engine: EngineStore, turns: int) -> None:
    asking = asyncio.create_task(engine.ask("leaves", item(A), item(B)))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        engine.read(await asking)


@pytest.mark.parametrize("unanswered", [Lookup, Reserve, None])
async def test_dead_engine_ends_requests_that_wait_for_its_answer(engine: EngineStore, unanswered: type | None) -> None:
    """Or that wait while a thread copies."""
    engine.unanswered = unanswered
    engine.memory.go.clear()
    asking = [asyncio.create_task(engine.ask(name, item(A, LARGE))) for name in ("one", "two")]
    await eventually(lambda: unanswered in engine.sent or engine.memory.begun == 1)
    engine.handle.die()
    engine.memory.go.set()
    for task in (*asking, asyncio.create_task(engine.ask("late", item(B)))):
        with pytest.raises(EngineError, match="stopped"):
            await task


async def test_nothing_is_asked_without_media_and_nothing_reserved_without_a_store() -> None:
    client = MediaStoreClient(0, pytest.fail, pytest.fail, 2, CacheAccess(1 << 30))
    request = NewRequest("asks", [1], media=[item(B)])
    assert await client.look_up("asks", []) == {} and await client.store_media(request) is request
