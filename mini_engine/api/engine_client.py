"""The API server's link to all engines, and which of them a request goes to. Knows nothing of HTTP, text or media."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

import zmq.asyncio

from mini_engine import metrics
from mini_engine.api.engine import Engine, EngineContext
from mini_engine.api.errors import EngineError
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import TensorIpcSender

if TYPE_CHECKING:
    from mini_engine.transport.arena import WritableMemory

# How many samples more than the least loaded engine one may have to be preferred for a prompt's media: a few more in a
# batch cost a request some milliseconds, while decoding a video again costs hundreds.
LOAD_MARGIN = 4
LOST_SECONDS = 5.0  # for the supervisor to report the death of an engine that cannot be reached
METRICS_SECONDS = 1.0  # for the engines to report; Prometheus gives a whole scrape ten


class EngineLost(Exception):
    """A running engine cannot be reached from this process: another process may reach it."""


class EngineClient:
    """All engines; `queues` holds the tensor queue to each.

    With a `media_capacity` of 0 no engine is asked for media that it may have. `stores`: the memory of the media store
    of each, if it has one; an item of more than `max_object_bytes` is not stored.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        encoder: Encoder,
        endpoints: Sequence[str],
        queues: Sequence[TensorIpcSender],
        *,
        media_capacity: int,
        stores: Sequence[WritableMemory | None],
        max_object_bytes: int = 0,
    ):
        name = sockets.identity(encoder.sender, encoder.incarnation)
        self._blocks: set[asyncio.Timeout] = set()  # that last no longer than the engines
        self._gone: set[int] = set()  # engines whose death was reported
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draining = False  # this process exits when its last request has finished
        shared = EngineContext(
            encoder, media_capacity, max_object_bytes, self._show_memory, self._end_blocks, self._on_lost
        )
        self.engines = [
            Engine(number, sockets.connect_dealer(context, endpoint, name), queue, store, shared)
            for number, (endpoint, queue, store) in enumerate(zip(endpoints, queues, stores, strict=True))
        ]

    def check(self) -> None:
        """Raises EngineError when no engine runs: then a request is not parsed."""
        if not self._running:
            self.engines[0].check()

    @contextlib.asynccontextmanager
    async def while_running(self) -> AsyncIterator[None]:
        """When the last engine stops the block is cancelled, as when the client disconnects. Raises EngineError: no
        engine runs, at first or any more."""
        self.check()
        try:
            async with asyncio.timeout(None) as block:
                self._blocks.add(block)
                try:
                    yield
                finally:
                    self._blocks.discard(block)
        except TimeoutError:
            self.check()
            raise

    @property
    def alive(self) -> bool:
        """Whether every engine serves, as far as is known without asking."""
        return all(engine.stopped is None for engine in self.engines)

    async def healthy(self, within: float) -> bool:
        """Whether every engine serves, and answers a ping through all of its ranks within so many seconds."""
        return all(await asyncio.gather(*(engine.answers_ping(within) for engine in self.engines)))

    async def run(self) -> None:
        """Take what the cores send, until cancelled. Raises EngineLost: this process must be replaced."""
        await asyncio.gather(self._lost, *(engine.receive() for engine in self.engines))

    @contextlib.contextmanager
    def choose(self, media_hash: bytes | None = None, samples: int = 1) -> Iterator[Engine]:
        """The engine for a request with `samples` samples whose first item of media has this hash.

        Without media the one with the fewest unfinished samples. With them, of those with up to `LOAD_MARGIN` more, the
        one that rendezvous hashing prefers (Thaler and Ravishankar 1998): so all API servers send the same media to the
        same engine, which caches them, without a word between them.

        While the block runs the request counts as the engine's; it is to be submitted at once afterwards. Raises
        EngineError: no engine runs.
        """
        self.check()
        running = self._running
        least = min(engine.load for engine in running)
        if media_hash is None:
            engine = next(engine for engine in running if engine.load == least)
        else:
            close = [engine for engine in running if engine.load <= least + LOAD_MARGIN]
            engine = max(close, key=lambda one: hashlib.blake2b(media_hash + bytes([one.number])).digest())
        engine.preparing += samples
        try:
            yield engine
        finally:
            engine.preparing -= samples

    async def refresh_metrics(self) -> None:
        """Bring the engines' metrics up to date; those of an engine that does not answer in time stay as they are."""
        asking = [asyncio.create_task(engine.refresh_metrics()) for engine in self.engines]
        await asyncio.wait(asking, timeout=METRICS_SECONDS)
        for task in asking:
            task.cancel()

    async def reset_caches(self) -> None:
        """Empty the caches of every engine, but for what running requests use. Cancelling it stops the wait only.
        Raises EngineError: an engine is down."""
        await asyncio.gather(*(engine.reset_caches() for engine in self.engines))

    def peer_gone(self, sender: str) -> None:
        """A process has died: with a core or one of its workers, the engine and all of its requests end."""
        role, _, index = sender.partition(" ")
        if role in ("core", "worker"):
            number = int(index.partition(".")[0])
            self._gone.add(number)
            self.engines[number].die()

    def stop(self, why: EngineError) -> None:
        """End all requests with `why`, and refuse new ones."""
        for engine in self.engines:
            engine.stop(why, why)

    def close(self) -> None:
        """Stop, and close all sockets."""
        for engine in self.engines:
            engine.close()

    @property
    def _running(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.stopped is None]

    def _on_lost(self, engine: int) -> None:
        """Wait for the report of its death. The engines of a former generation are all dead, and were reported."""
        asyncio.get_running_loop().call_later(LOST_SECONDS, self._check_lost, engine)

    def _check_lost(self, engine: int) -> None:
        if engine not in self._gone and not self.draining and not self._lost.done():
            self._lost.set_exception(EngineLost("a running engine cannot be reached; this API server exits"))

    def _end_blocks(self) -> None:
        """Without effect while an engine runs. They end in the loop's next turn, after the requests of the engine."""
        if not self._running:
            for block in self._blocks:
                block.reschedule(0)

    def _show_memory(self) -> None:
        metrics.ipc_buffered_bytes.set(sum(engine.queue.buffered_bytes for engine in self.engines))
        metrics.ipc_buffered_tensors.set(sum(engine.queue.buffered_tensors for engine in self.engines))
