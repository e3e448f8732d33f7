"""The engines as this API server sees them: requests go out, tokens come in.

`EngineClient` chooses the `Engine` of each request. Knows nothing of HTTP, text, or how media are made. All of it
belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import zmq
import zmq.asyncio

from mini_engine import metrics
from mini_engine.engine_client.media_store_client import MediaStoreClient
from mini_engine.engine_client.request_sender import RequestSender
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
from mini_engine.prompt.answer import Generation
from mini_engine.protocol.api_errors import EngineError, MediaNotSent
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.tensor_ipc import TensorIpcSender

if TYPE_CHECKING:
    from mini_engine.transport.arena import WritableMemory

logger = logging.getLogger(__name__)

# How many samples more than the least loaded engine one may have to be preferred for a prompt's media: a few more in a
# batch cost a request some milliseconds, while decoding a video again costs hundreds.
LOAD_MARGIN = 4
LOST_SECONDS = 5.0  # for the supervisor to report the death of an engine that cannot be reached
METRICS_SECONDS = 1.0  # for the engines to report; Prometheus gives a whole scrape ten
ENGINE_DIED = "The engine that served this request has stopped; send it again later."
ENGINE_STOPPED = "The engine has stopped; send this request again later."


class EngineLost(Exception):
    """A running engine cannot be reached from this process: another process may reach it."""


class Engine:
    """One engine core and its ranks, seen from this API server.

    `requests` holds the generation of each sample's id, from before its tensors are reserved until the core's final
    output for the sample, which comes even for one that was aborted, or its `MediaMiss`.
    """

    def __init__(
        self,
        number: int,
        socket: zmq.asyncio.Socket,
        encoder: Encoder,
        queue: TensorIpcSender,
        media_capacity: int,
        store: WritableMemory | None,
        max_object_bytes: int,
    ):
        """See `EngineClient`."""
        self.number = number
        self.queue = queue
        self.requests: dict[str, Generation] = {}
        self.preparing = 0  # samples of requests that chose this engine and are not in `requests` yet
        self.stopped: EngineError | None = None  # what requests end with once it serves no more
        self.may_be_lost = False  # the supervisor has reported its death, or this process is draining
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # raises EngineLost
        self._socket = socket
        self._encoder = encoder
        self._metrics = metrics.EngineMetrics(number, media_capacity)
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[ControlReply | None]] = {}  # to control requests, by number
        self._ping: asyncio.Future[ControlReply | None] | None = None
        self._sender = RequestSender(encoder, queue, self._send_frame)
        is_cached = media_capacity > 0
        self.media = MediaStoreClient(number, self._send, queue.num_ranks, is_cached, store, max_object_bytes)

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
        before the request does, straight to the ranks. Cancelling it leaves nothing behind, inside of `media.holding`.
        Raises EngineError: the engine is down, or the tensors cannot be sent.
        """
        self.requests |= dict.fromkeys(generation.samples, generation)
        try:
            request = await self.media.place(request)
            await self._sender.submit(request)
        except BaseException:
            self._forget(generation)
            raise
        generation.finish_at_engine = self.finish
        at_engine = request.request_id, self.number, len(request.media)
        logger.debug("%s sent to engine %d, with %d media items", *at_engine, extra=about(request.request_id))

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Have the core end a request. Its entry stays until the core's final output for it."""
        if request_id in self.requests:
            with contextlib.suppress(EngineError):
                self._send(Finish(request_id, reason))

    def control(self, action: Literal["ping", "stats", "reset_caches"]) -> asyncio.Future[ControlReply | None]:
        """Send a control request. The future, which must not be cancelled, is None if the engine is down."""
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        if self.stopped is None:
            self._replies[number] = reply
            with contextlib.suppress(EngineError):  # the reply is None then
                self._send(ControlRequest(number, action))
        else:
            reply.set_result(None)
        return reply

    async def answers_ping(self, within: float) -> bool:
        """Whether the core and all its ranks answer a ping within so many seconds. While one is not answered, all
        callers wait for it."""
        if self._ping is None or self._ping.done():
            self._ping = self.control("ping")
        reply = self._ping
        await asyncio.wait([reply], timeout=within)
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
        for generation in requests.values():
            generation.fail(begun)
        for reply in self._replies.values():
            reply.set_result(None)
        self._replies.clear()
        self._sender.close(why)

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
                for output in body.outputs:
                    self._on_output(output)
                if body.consumed:
                    self._sender.consumed(body.consumed)
            case MediaMiss(request_id=request_id):
                generation = self.requests[request_id]
                self._forget(generation)
                generation.fail(MediaNotSent())
            case Found():
                self.media.on_found(body)
            case Reserved():
                self.media.on_reserved(body)
            case ControlReply(number=number, stats=stats):
                if stats is not None:
                    self._metrics.update(stats)
                if (reply := self._replies.pop(number, None)) is not None:
                    reply.set_result(body)

    def _on_output(self, output: RequestOutput) -> None:
        if output.finish_reason is None:
            generation = self.requests.get(output.request_id)
        else:
            generation = self.requests.pop(output.request_id, None)
        if generation is not None:
            generation.receive(output)

    def _forget(self, generation: Generation) -> None:
        """The core has no state of it: there will be no final output."""
        for request_id in generation.samples:
            self.requests.pop(request_id, None)

    def _send(self, body: AnyMessage) -> None:
        self._send_frame(self._encoder.encode(body))

    def _send_frame(self, frame: bytes) -> None:
        self.check()
        try:
            send_now(self._socket, frame)
        except zmq.ZMQError as error:
            self._lose(f"cannot send to it: {error}")
            self.check()

    def _lose(self, why: str) -> None:
        """A connection to it has ended. If it has died the supervisor reports that, too."""
        if self.stopped is None:
            logger.error("connection to engine %d lost: %s", self.number, why)
            self.die()
            asyncio.get_running_loop().call_later(LOST_SECONDS, self._check_lost)

    def _check_lost(self) -> None:
        if not self.may_be_lost and not self.lost.done():
            self.lost.set_exception(EngineLost("a running engine cannot be reached; this API server exits"))


class EngineClient:
    """All engines of this API server.

    Args:
        endpoints: of the engine cores; `queues` and `stores` are in the same order.
        media_capacity: most bytes of cached media that an engine can read; 0: no engine is asked for media.
        stores: the memory of each engine's media store, if it has one.
        max_object_bytes: larger items are not stored.
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
        self.preparing: set[Callable[[EngineError], None]] = set()  # each ends a request that no engine has yet
        self.engines = [
            Engine(
                number,
                sockets.connect_dealer(context, endpoint, name),
                encoder,
                queue,
                media_capacity,
                store,
                max_object_bytes,
            )  # fmt: skip
            for number, (endpoint, queue, store) in enumerate(zip(endpoints, queues, stores, strict=True))
        ]

    def check(self) -> None:
        """Raises EngineError when no engine runs."""
        if not self._running:
            self.engines[0].check()

    @property
    def alive(self) -> bool:
        """Whether every engine serves, as far as is known without asking."""
        return all(engine.stopped is None for engine in self.engines)

    async def run(self) -> None:
        """Take what the cores send, until cancelled. Raises EngineLost: this process must be replaced."""
        await asyncio.gather(*(engine.lost for engine in self.engines), *(engine.receive() for engine in self.engines))

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
        await asyncio.wait([engine.control("stats") for engine in self.engines], timeout=METRICS_SECONDS)

    async def reset_caches(self) -> None:
        """Empty the caches of every engine, but for what running requests use. Cancelling it stops the wait only.
        Raises EngineError: an engine is down."""
        await asyncio.wait([engine.control("reset_caches") for engine in self.engines])
        for engine in self.engines:
            engine.check()

    def peer_gone(self, sender: str) -> None:
        """A process has died: with a core or one of its workers, the engine and all of its requests end."""
        role, _, index = sender.partition(" ")
        if role in ("core", "worker"):
            engine = self.engines[int(index.partition(".")[0])]
            engine.may_be_lost = True
            engine.die()
            self._end_preparing()

    def drain(self) -> None:
        """This process exits when its last request has finished, and is not replaced before."""
        for engine in self.engines:
            engine.may_be_lost = True

    def stop(self, why: EngineError) -> None:
        """End all requests with `why`, and refuse new ones."""
        for engine in self.engines:
            engine.stop(why, why)
        self._end_preparing()

    def close(self) -> None:
        """Stop, and close all sockets."""
        for engine in self.engines:
            engine.close()

    def _end_preparing(self) -> None:
        """Without effect while an engine runs."""
        if not self._running and (why := self.engines[0].stopped):
            for end in list(self.preparing):
                end(why)

    @property
    def _running(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.stopped is None]


def send_now(socket: zmq.asyncio.Socket, frame: bytes) -> None:
    """Queue `frame` at once, without yielding to other tasks. Raises zmq.ZMQError: the queue is full."""
    socket.send(frame, zmq.NOBLOCK).result()  # type: ignore[attr-defined] # with this flag a future that is done
