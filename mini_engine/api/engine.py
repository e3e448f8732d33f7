"""One engine as this API server sees it: requests go out, tokens come in.

Knows nothing of HTTP, text, or how media are made. All of it belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from mini_engine import metrics
from mini_engine.api.errors import EngineError, MediaNotSent
from mini_engine.api.generation import Generation, Sample
from mini_engine.api.media_cache import MediaCopy
from mini_engine.api.media_store import MediaStore
from mini_engine.api.pulse import Pulse
from mini_engine.api.sending import RequestSender
from mini_engine.log import about
from mini_engine.messages import (
    Accepted,
    AnyMessage,
    AskFigures,
    Attach,
    Busy,
    Cached,
    CachesReset,
    Consumed,
    Evicted,
    Figures,
    Finish,
    FinishReason,
    LastUsed,
    MediaMiss,
    NewRequest,
    Outputs,
    Pong,
    RequestOutput,
    ResetCaches,
    Retracted,
    Unwanted,
)
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.tensor_ipc import TensorIpcSender

logger = logging.getLogger(__name__)

ENGINE_DIED = "The engine that served this request has stopped; send it again later."
ENGINE_STOPPED = "The engine has stopped; send this request again later."

# Makes a request again, with the patches of those of its items that have one of these hashes.
Refill = Callable[[NewRequest, Collection[bytes]], Awaitable[NewRequest]]


@dataclass(frozen=True)
class Surroundings:
    """What all engines of an API server share."""

    encoder: Encoder
    media_capacity: int  # most bytes of cached media that an engine can read; 0: none are cached
    store: MediaStore | None  # this server's part of the shared-memory store
    on_memory: Callable[[], None]  # the memory of tensors on their way has changed
    on_stop: Callable[[], None]  # an engine serves no more
    on_lost: Callable[[int], None]  # the engine of this number cannot be reached, and nothing has said that it died


class Engine:
    """One engine core and its ranks, seen from this API server.

    `requests` holds each sample of a request from before its tensors are reserved until the core's final output for it,
    which comes even for one that was aborted.
    """

    def __init__(self, number: int, socket: zmq.asyncio.Socket, queue: TensorIpcSender, surroundings: Surroundings):
        self.number = number
        self.media = MediaCopy(number, enabled=surroundings.media_capacity > 0)
        self.requests: dict[str, Sample] = {}
        self.preparing = 0  # samples of requests that chose this engine and are not in `requests` yet
        self.stopped: EngineError | None = None  # what requests end with once it serves no more
        self._socket = socket
        self._encoder = surroundings.encoder
        self._store = surroundings.store
        self._on_stop = surroundings.on_stop
        self._on_lost = surroundings.on_lost
        self._figures = metrics.EngineFigures(number, surroundings.media_capacity)
        self._resets: dict[int, asyncio.Future[None]] = {}
        self._asked: asyncio.Future[None] | None = None  # for its figures
        self._pulse = Pulse(lambda ping: self._send(self._encoder.encode(ping)))
        self._sender = RequestSender(self._encoder, queue, self._send, surroundings.on_memory)
        self.tell(Attach())

    @property
    def buffered_bytes(self) -> int:
        """Bytes of tensors reserved or sent and not yet consumed by all ranks."""
        return self._sender.queue.buffered_bytes

    @property
    def buffered_tensors(self) -> int:
        """Tensors copied or sent and not yet consumed by all ranks."""
        return self._sender.queue.buffered_tensors

    @property
    def load(self) -> int:
        """Samples that the engine has to finish, or will be sent."""
        return len(self.requests) + self.preparing

    def check(self) -> None:
        """Raises EngineError when it serves no more."""
        if self.stopped is not None:
            raise self.stopped.with_traceback(None)  # which would grow with each who meets it

    async def submit(self, request: NewRequest, refill: Refill) -> Generation:
        """Hand `request` to the engine, its media's patches still tensors, or None where `media` names the hash.

        Waits for room for the tensors, which leave before the request does, straight to the ranks; and, if there are
        media, until the engine has accepted the request. Where the engine has dropped media meanwhile, `refill` makes
        the request again and it is sent anew. Cancelling it leaves nothing behind.

        Raises:
            EngineError: the engine is gone, or the tensors cannot be sent or do not arrive (MediaNotSent).
            MediaError: by `refill`.
        """
        generation = Generation(self, [request.request_id, *(sibling.request_id for sibling in request.siblings)])
        self.requests |= {sample.request_id: sample for sample in generation.samples}
        lost = False
        try:
            while True:
                missing = await self._submit_once(request, generation)
                if missing is None:  # the engine has it all, or has ended it
                    logger.debug(
                        "%s is at engine %d, which has its %d media", request.request_id, self.number,
                        len(request.media), extra=about(request.request_id),
                    )  # fmt: skip
                    return generation
                # It has not, and lacks media that this server only named: they are made again.
                named = {item.media_hash for item in request.media if item.patches is None}.intersection(missing)
                if named:
                    self._figures.resends.inc()
                    request = await refill(request, named)
                elif lost:
                    raise MediaNotSent()
                else:  # or tensors that were sent: once more
                    logger.warning(
                        "%s: engine %d cannot use its tensors; they are sent again", request.request_id, self.number,
                        extra=about(request.request_id),
                    )  # fmt: skip
                    metrics.ipc_fallbacks_total.labels("lost").inc()
                    lost = True
        except BaseException:
            if generation.at_engine:
                generation.abort()
            else:
                self._forget(generation)
            raise

    def tell(self, body: AnyMessage) -> None:
        """Send what is no request; it is dropped if the engine is gone."""
        with contextlib.suppress(EngineError):
            self._send(self._encoder.encode(body))

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Tell the core to end a request. Its entry stays until the core's final output for it."""
        if request_id in self.requests:
            self.tell(Finish(request_id, reason))

    async def refresh_figures(self) -> None:
        """Bring the engine's metrics up to date; without effect when it is gone. Cancelling it stops the wait only."""
        if self.stopped is not None:
            return
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            self.tell(AskFigures())
        await asyncio.wait([self._asked])

    def reset_caches(self, number: int) -> asyncio.Future[None]:
        """Ask the core to forget what its caches hold; `number` has not been used before. Done when it has answered.

        Raises:
            EngineError: the engine is gone; so does the future.
        """
        self._send(self._encoder.encode(ResetCaches(number)))
        done = self._resets[number] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda _: self._resets.pop(number, None))
        return done

    async def answers(self, within: float) -> bool:
        """Whether the core and all its ranks answer a ping within so many seconds."""
        return self.stopped is None and await self._pulse.check(within)

    def stop(self, why: EngineError, begun: EngineError | None = None) -> None:
        """End all requests with `why` and refuse new ones: the engine is gone, or this server is going.

        Those that the engine had end with `begun`, if it is given.
        """
        if self.stopped is not None:
            return
        self.stopped = why
        self._figures.forget()
        self.media.clear()
        requests, self.requests = self.requests, {}
        for sample in requests.values():
            sample.fail(begun or why)
        if self._asked is not None:
            self._asked.cancel()
        for reset in list(self._resets.values()):
            if not reset.done():
                reset.set_exception(why)
        self._pulse.stop()
        self._sender.close(why)
        self._on_stop()

    def die(self) -> None:
        """The engine is dead."""
        gone = EngineError(ENGINE_STOPPED, engine_gone=True)
        self.stop(gone, EngineError(ENGINE_DIED, engine_gone=True, begun=True))

    def close(self) -> None:
        """Stop, and close the socket."""
        self.stop(EngineError(ENGINE_STOPPED, engine_gone=True))
        self._socket.close()

    async def receive(self) -> None:
        """Take what the core sends, until cancelled; and see whether a rank can no longer be reached."""
        self._sender.queue.watch_end(self._lose)
        while True:
            body = decode(await self._socket.recv()).body
            if self.stopped is None:
                self._handle(body)

    def _handle(self, body: AnyMessage) -> None:
        match body:
            case Outputs(outputs=outputs):
                for output in outputs:
                    self._on_output(output)
            case Accepted(request_ids=request_ids):
                self._on_accepted(request_ids)
            case MediaMiss(late=True, request_id=request_id):
                self._on_late(request_id)
            case MediaMiss(request_id=request_id, hashes=hashes):
                self._on_miss(request_id, hashes)
            case Figures(stats=stats, counters=counters):
                self._figures.update(stats, counters)
                if self._asked is not None and not self._asked.done():
                    self._asked.set_result(None)
            case _:
                self._handle_media(body)

    def _handle_media(self, body: AnyMessage) -> None:
        match body:
            case Consumed(messages=messages):
                self._sender.consumed(messages)
            case Cached(items=items):
                self.media.add(items)
            case Evicted(hashes=hashes):
                self.media.drop(hashes)
            case Retracted() | Busy() | LastUsed() | Unwanted() if self._store is not None:
                self._store.hear(self.number, body)
            case Pong(number=number):
                self._pulse.pong(number)
            case CachesReset(number=number):
                if (reset := self._resets.get(number)) is not None and not reset.done():
                    reset.set_result(None)

    def _on_accepted(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (sample := self.requests.get(request_id)) is not None:
                sample.generation.accept()

    def _on_miss(self, request_id: str, hashes: list[bytes]) -> None:
        self.media.drop(hashes)
        sample = self.requests.get(request_id)
        if sample is None:
            return
        sample.generation.miss(hashes)
        if sample.generation.over:  # aborted meanwhile: the core, which did not take it, will send no end
            self._forget(sample.generation)

    def _on_late(self, request_id: str) -> None:
        """Its tensors have not reached all ranks in time: the core has forgotten the request."""
        if (sample := self.requests.get(request_id)) is not None:
            self._forget(sample.generation)
            sample.generation.miss([])
            sample.fail(MediaNotSent())

    def _on_output(self, output: RequestOutput) -> None:
        if output.finish_reason is None:
            sample = self.requests.get(output.request_id)
        else:
            sample = self.requests.pop(output.request_id, None)
        if sample is not None:
            sample.receive(output)

    def _forget(self, generation: Generation) -> None:
        """The core knows nothing of it: no final output will come."""
        for sample in generation.samples:
            self.requests.pop(sample.request_id, None)

    async def _submit_once(self, request: NewRequest, generation: Generation) -> list[bytes] | None:
        """Send `request` and wait for the engine's answer; what is in the store is held there meanwhile.

        Returns the hashes of the media that the engine lacks; None: it has accepted the request, or ended it.
        """
        async with contextlib.AsyncExitStack() as held:
            if self._store is not None and request.media:
                request = await held.enter_async_context(self._store.placing(request))
            await self._sender.submit(request)
            generation.at_engine = True
            return await generation.missing() if request.media else None

    def _send(self, frame: bytes) -> None:
        self.check()
        try:
            send_now(self._socket, frame)
        except zmq.ZMQError as error:
            self._lose(f"it takes no more messages: {error}")
            self.check()

    def _lose(self, why: str) -> None:
        """A connection to it has ended. If it has died the supervisor says so, too."""
        if self.stopped is None:
            logger.error("engine %d is treated as dead: %s", self.number, why)
            self.die()
            self._on_lost(self.number)


def send_now(socket: zmq.asyncio.Socket, frame: bytes) -> None:
    """Queue `frame` at once, without giving way to other tasks.

    Raises:
        zmq.ZMQError: the queue is full.
    """
    sent: Any = socket.send(frame, zmq.NOBLOCK)  # with this flag pyzmq returns a future that is done
    sent.result()
