"""One engine as this API server sees it: requests go out, tokens come in.

Knows nothing of HTTP, text, or how media are made. All of it belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from mini_engine import metrics
from mini_engine.api.errors import EngineError, MediaNotSent
from mini_engine.api.generation import Generation, Sample
from mini_engine.api.media_store import MediaStoreClient
from mini_engine.api.pulse import Pulse
from mini_engine.api.sending import RequestSender
from mini_engine.log import about
from mini_engine.messages import (
    Accepted,
    AnyMessage,
    AskFigures,
    CachesReset,
    Consumed,
    Figures,
    Finish,
    FinishReason,
    Found,
    MediaMiss,
    Outputs,
    Pong,
    RequestOutput,
    Reserved,
    ResetCaches,
)
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.tensor_ipc import TensorIpcSender

if TYPE_CHECKING:
    from mini_engine.transport.arena import WritableMemory

logger = logging.getLogger(__name__)

ENGINE_DIED = "The engine that served this request has stopped; send it again later."
ENGINE_STOPPED = "The engine has stopped; send this request again later."


@dataclass(frozen=True)
class Surroundings:
    """What all engines of an API server share."""

    encoder: Encoder
    media_capacity: int  # most bytes of cached media that an engine can read; 0: none are cached
    max_object_bytes: int  # of an item in the media store
    on_memory: Callable[[], None]  # the memory of tensors on their way has changed
    on_stop: Callable[[], None]  # an engine serves no more
    on_lost: Callable[[int], None]  # the engine of this number cannot be reached, and nothing has said that it died


class Engine:
    """One engine core and its ranks, seen from this API server.

    `requests` holds each sample of a request from before its tensors are reserved until the core's final output for it,
    which comes even for one that was aborted.
    """

    def __init__(
        self,
        number: int,
        socket: zmq.asyncio.Socket,
        queue: TensorIpcSender,
        store: WritableMemory | None,
        surroundings: Surroundings,
    ):
        """`store`: the memory of its media store, if it has one."""
        self.number = number
        self.requests: dict[str, Sample] = {}
        self.preparing = 0  # samples of requests that chose this engine and are not in `requests` yet
        self.stopped: EngineError | None = None  # what requests end with once it serves no more
        self._socket = socket
        self._encoder = surroundings.encoder
        self._on_stop = surroundings.on_stop
        self._on_lost = surroundings.on_lost
        self._figures = metrics.EngineFigures(number, surroundings.media_capacity)
        self._resets: dict[int, asyncio.Future[None]] = {}
        self._asked: asyncio.Future[None] | None = None  # for its figures
        self._pulse = Pulse(lambda ping: self._send(self._encoder.encode(ping)))
        self._sender = RequestSender(self._encoder, queue, self._send, surroundings.on_memory)
        self.media = MediaStoreClient(
            number,
            lambda body: self._send(self._encoder.encode(body)),
            queue.num_ranks,
            surroundings.media_capacity > 0,
            store,
            surroundings.max_object_bytes,
        )

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

    async def submit(self, generation: Generation) -> None:
        """Send the engine `generation.request`, whose patches are tensors, or None where `media` has found the item.

        What finds room in the store is written there; for the rest this waits for room for its tensors, which leave
        before the request does, straight to the ranks; and, if there are media, until the engine has accepted the
        request. Cancelling it leaves nothing behind, inside of `media.holding`.

        Raises:
            EngineError: the engine is gone, or the tensors cannot be sent or do not arrive (MediaNotSent).
        """
        self.requests |= {sample.request_id: sample for sample in generation.samples}
        try:
            request = await self.media.place(generation.request)
            for again in (False, True):
                await self._sender.submit(request)
                accepted = generation.sent_to(self)
                if not request.media or await accepted:
                    at_engine = request.request_id, self.number, len(request.media)
                    logger.debug("%s is at engine %d, with %d media", *at_engine, extra=about(request.request_id))
                    return
                if not again:
                    logger.warning(
                        "%s: engine %d cannot use its tensors; they are sent again", request.request_id, self.number,
                        extra=about(request.request_id),
                    )  # fmt: skip
                    metrics.ipc_fallbacks_total.labels("lost").inc()
            raise MediaNotSent()
        except BaseException:
            if generation.engine is not None:
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
        self.media.close(why)
        requests, self.requests = self.requests, {}
        for sample in requests.values():
            sample.generation.fail(begun or why)
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
            case MediaMiss(request_id=request_id, late=late):
                self._on_turned_down(request_id, late)
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
            case Found():
                self.media.on_found(body)
            case Reserved():
                self.media.on_reserved(body)
            case Pong(number=number):
                self._pulse.pong(number)
            case CachesReset(number=number):
                if (reset := self._resets.get(number)) is not None and not reset.done():
                    reset.set_result(None)

    def _on_accepted(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (sample := self.requests.get(request_id)) is not None:
                sample.generation.answer(accepted=True)

    def _on_turned_down(self, request_id: str, late: bool) -> None:
        """The core has forgotten the request, but not its references."""
        generation = self.requests[request_id].generation
        if late:  # its tensors are on their way still
            generation.fail(MediaNotSent())
        if late or generation.over:  # aborted meanwhile
            self._forget(generation)
        generation.answer(accepted=False)

    def _on_output(self, output: RequestOutput) -> None:
        if output.finish_reason is None:
            sample = self.requests.get(output.request_id)
        else:
            sample = self.requests.pop(output.request_id, None)
        if sample is not None:
            sample.generation.receive(sample, output)

    def _forget(self, generation: Generation) -> None:
        """The core knows nothing of it: no final output will come."""
        for sample in generation.samples:
            self.requests.pop(sample.request_id, None)

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
