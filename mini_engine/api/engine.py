"""One engine as this API server sees it: requests go out, tokens come in.

Knows nothing of HTTP, text, or how media are made. All of it belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import zmq
import zmq.asyncio

from mini_engine import metrics
from mini_engine.api.errors import EngineError, MediaNotSent
from mini_engine.api.generation import Generation, Sample
from mini_engine.api.media_store import MediaStoreClient
from mini_engine.api.sending import RequestSender
from mini_engine.log import about
from mini_engine.messages import (
    AnyMessage,
    ControlReply,
    ControlRequest,
    Finish,
    FinishReason,
    Found,
    MediaMiss,
    NewRequest,
    Outputs,
    RequestOutput,
    Reserved,
)
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.tensor_ipc import TensorIpcSender

if TYPE_CHECKING:
    from mini_engine.transport.arena import WritableMemory

logger = logging.getLogger(__name__)

OVERDUE_SECONDS = 0.5
ENGINE_DIED = "The engine that served this request has stopped; send it again later."
ENGINE_STOPPED = "The engine has stopped; send this request again later."


@dataclass(frozen=True)
class EngineContext:
    """Shared by all engines of an API server."""

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
        context: EngineContext,
    ):
        """`store`: the memory of its media store, if it has one."""
        self.number = number
        self.queue = queue
        self.requests: dict[str, Sample] = {}
        self.preparing = 0  # samples of requests that chose this engine and are not in `requests` yet
        self.stopped: EngineError | None = None  # what requests end with once it serves no more
        self._socket = socket
        self._encoder = context.encoder
        self._on_lost = context.on_lost
        self._on_stop = context.on_stop
        self._metrics = metrics.EngineMetrics(number, context.media_capacity)
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[ControlReply | None]] = {}  # to control requests, by number
        self._ping_reply: asyncio.Future[ControlReply | None] | None = None
        self._pinged_at = 0.0
        self._sender = RequestSender(self._encoder, queue, self._send, context.on_memory)
        self.media = MediaStoreClient(
            number,
            lambda body: self._send(self._encoder.encode(body)),
            queue.num_ranks,
            context.media_capacity > 0,
            store,
            context.max_object_bytes,
        )

    @property
    def load(self) -> int:
        """Samples that the engine has to finish, or will be sent."""
        return len(self.requests) + self.preparing

    def check(self) -> None:
        """Raises EngineError when it is down."""
        if self.stopped is not None:
            raise self.stopped.with_traceback(None)  # which would grow with each who meets it

    async def submit(self, generation: Generation, request: NewRequest) -> None:
        """Send the engine the `request` of `generation`. Its patches are tensors, or None where `media` has found the
        item.

        What finds room in the store is written there; for the rest this waits for room for its tensors, which leave
        before the request does, straight to the ranks; and, if there are media, until the engine has accepted the
        request. Cancelling it leaves nothing behind, inside of `media.holding`. Raises EngineError: the engine is down,
        or the tensors cannot be sent or do not arrive (MediaNotSent).
        """
        self.requests |= {sample.request_id: sample for sample in generation.samples}
        try:
            request = await self.media.place(request)
            for again in (False, True):
                await self._sender.submit(request)
                accepted = generation.sent(self.finish)
                if not request.media or await accepted:
                    at_engine = request.request_id, self.number, len(request.media)
                    logger.debug("%s is at engine %d, with %d media items", *at_engine, extra=about(request.request_id))
                    return
                if not again:
                    logger.warning(
                        "%s: engine %d could not read its tensors; sending them again", request.request_id, self.number,
                        extra=about(request.request_id),
                    )  # fmt: skip
                    metrics.ipc_fallbacks_total.labels("lost").inc()
            raise MediaNotSent()
        except BaseException:
            if generation.finish_at_engine is not None:
                generation.abort()
            else:
                self._forget(generation)
            raise

    def send(self, body: AnyMessage) -> None:
        """Send what is no request; it is dropped if the engine is down."""
        with contextlib.suppress(EngineError):
            self._send(self._encoder.encode(body))

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Have the core end a request. Its entry stays until the core's final output for it."""
        if request_id in self.requests:
            self.send(Finish(request_id, reason))

    async def refresh_metrics(self) -> None:
        """Bring the engine's metrics up to date; without effect when it is down. Cancelling it stops the wait only."""
        if self.stopped is None:
            await asyncio.wait([self._control("stats")])

    async def reset_caches(self) -> None:
        """Have the core drop all that its caches hold and no running request uses. Cancelling it stops the wait only.
        Raises EngineError: the engine is down."""
        self.check()
        if await asyncio.shield(self._control("reset_caches")) is None:
            self.check()

    async def answers_ping(self, within: float) -> bool:
        """Whether the core and all its ranks answer a ping within so many seconds of it.

        At most one is sent at a time, which all callers await. An unanswered ping does not time out: the engine hangs.
        """
        if self.stopped is not None:
            return False
        if self._ping_reply is None or self._ping_reply.done():
            self._ping_reply, self._pinged_at = self._control("ping"), time.monotonic()
        reply = self._ping_reply
        # An overdue reply gets a little time: perhaps this process was the one that hung.
        left = max(self._pinged_at + within - time.monotonic(), min(within, OVERDUE_SECONDS))
        await asyncio.wait([reply], timeout=left)
        return reply.done() and reply.result() is not None

    def stop(self, why: EngineError, begun: EngineError) -> None:
        """Refuse new requests with `why`, and end those that the engine has with `begun`: the engine is down, or this
        server is going."""
        if self.stopped is not None:
            return
        self.stopped = why
        self._metrics.forget()
        self.media.close(why)
        requests, self.requests = self.requests, {}
        for sample in requests.values():
            sample.generation.fail(begun)
        for reply in self._replies.values():
            reply.set_result(None)
        self._replies.clear()
        self._sender.close(why)
        self._on_stop()

    def die(self) -> None:
        """The engine is dead."""
        self.stop(EngineError(ENGINE_STOPPED), EngineError(ENGINE_DIED, 500))

    def close(self) -> None:
        """Stop, and close the socket."""
        self.die()
        self._socket.close()

    async def receive(self) -> None:
        """Take what the core sends, until cancelled; and see whether a rank can no longer be reached."""
        self.queue.watch_end(self._lose)
        while True:
            body = decode(await self._socket.recv()).body
            if self.stopped is None:
                self._handle(body)

    def _handle(self, body: AnyMessage) -> None:
        match body:
            case Outputs():
                for request_id in body.accepted:
                    if (sample := self.requests.get(request_id)) is not None:
                        sample.generation.answer(accepted=True)
                for output in body.outputs:
                    self._on_output(output)
                if body.consumed:
                    self._sender.consumed(body.consumed)
            case MediaMiss(request_id=request_id, late=late):
                self._on_rejected(request_id, late)
            case Found():
                self.media.on_found(body)
            case Reserved():
                self.media.on_reserved(body)
            case ControlReply(number=number, stats=stats):
                if stats is not None:
                    self._metrics.update(stats)
                if (reply := self._replies.pop(number, None)) is not None:
                    reply.set_result(body)

    def _control(self, action: Literal["ping", "stats", "reset_caches"]) -> asyncio.Future[ControlReply | None]:
        """Send a control request. The future is None when the engine is down; nothing cancels it."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self.send(ControlRequest(number, action))
        return reply

    def _on_rejected(self, request_id: str, late: bool) -> None:
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
        """The core has no state of it: there will be no final output."""
        for sample in generation.samples:
            self.requests.pop(sample.request_id, None)

    def _send(self, frame: bytes) -> None:
        self.check()
        try:
            send_now(self._socket, frame)
        except zmq.ZMQError as error:
            self._lose(f"cannot send to it: {error}")
            self.check()

    def _lose(self, why: str) -> None:
        """A connection to it has ended. If it has died the supervisor says so, too."""
        if self.stopped is None:
            logger.error("connection to engine %d lost: %s", self.number, why)
            self.die()
            self._on_lost(self.number)


def send_now(socket: zmq.asyncio.Socket, frame: bytes) -> None:
    """Queue `frame` at once, without yielding to other tasks.

    Raises:
        zmq.ZMQError: the queue is full.
    """
    sent: Any = socket.send(frame, zmq.NOBLOCK)  # with this flag pyzmq returns a future that is done
    sent.result()
