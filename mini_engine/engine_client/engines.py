"""The engines as this API server sees them: requests go out, tokens come in.

`EngineClient` chooses the `EngineHandle` of each request. Knows nothing of HTTP, text, or how media are made. All of it
belongs to the event loop's thread.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import zmq
import zmq.asyncio

from mini_engine import metrics
from mini_engine.engine_client.media_store_client import CacheAccess, MediaStoreClient
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
from mini_engine.protocol.api_errors import ENGINE_DIED, ApiError, EngineError, MediaNotSent
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.tensor_ipc import TensorIpcSender

logger = logging.getLogger(__name__)

# How many samples more than the least loaded engine one may have to be preferred for a prompt's media: a few more in a
# batch cost a request some milliseconds, while decoding a video again costs hundreds.
LOAD_MARGIN = 4
LOST_SECONDS = 5.0  # for the supervisor to report the death of an engine that cannot be reached
METRICS_SECONDS = 1.0  # for the engines to report; Prometheus gives a whole scrape ten
ENGINE_STOPPED = "The engine has stopped; send this request again later."


class EngineLost(Exception):
    """A running engine cannot be reached from this process: another process may reach it."""


class OutputReceiver(Protocol):
    """What takes the outputs of one request and its children; there are no more after `fail`."""

    def receive(self, output: RequestOutput) -> None: ...
    def fail(self, error: ApiError) -> None: ...


class EngineHandle:
    """One engine core and its ranks, seen from this API server."""

    def __init__(
        self, number: int, socket: zmq.asyncio.Socket, encoder: Encoder, queue: TensorIpcSender, cache: CacheAccess
    ):
        self.number = number
        # By the id of each sample: from before its tensors are reserved until its final output, which comes even if it
        # was aborted, or its `MediaMiss`.
        self.requests: dict[str, OutputReceiver] = {}
        self.preparing: dict[str, int] = {}  # samples of requests that chose this engine and are not in `requests` yet
        self.stopped: EngineError | None = None  # what requests end with once it serves no more
        # Whether this process goes on if a connection ends: the supervisor has reported the engine's death, or this
        # process is draining.
        self.end_is_expected = False
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # only ever raises EngineLost
        self._socket = socket
        self._encoder = encoder
        self._metrics = metrics.EngineMetrics(number, cache.capacity)
        self._numbers = itertools.count(1)
        self._replies: dict[str | bytes | int, asyncio.Future[Any]] = {}  # awaited by `_ask`, by its key
        self._ping: asyncio.Future[ControlReply | None] | None = None
        self._sender = RequestSender(encoder, queue, self._send_frame, self.check)
        self.media_store = MediaStoreClient(number, self._send, self._ask, queue.num_ranks, cache)

    @property
    def load(self) -> int:
        """Samples that the engine has to finish, or will be sent."""
        return len(self.requests) + sum(self.preparing.values())

    def check(self) -> None:
        """Raises EngineError when it is down."""
        if self.stopped is not None:
            raise self.stopped.with_traceback(None)  # which would grow with each request that it ends

    @contextlib.contextmanager
    def holding(self, request_id: str, samples: int) -> Iterator[None]:
        """A request with `samples` samples counts as the engine's; it is submitted inside of the block. If the block
        fails or is cancelled, the engine releases the media that the request refers to."""
        self.preparing[request_id] = samples
        try:
            yield
        except BaseException:
            self.media_store.release_aborted(request_id)
            raise
        finally:
            self.preparing.pop(request_id, None)

    async def submit(self, receiver: OutputReceiver, request: NewRequest) -> None:
        """Send the engine `request`, inside of `holding`. Its patches are tensors, or None where `media_store` has
        found the item or its embeddings. Cancelling it leaves nothing behind. Raises EngineError: the engine is down,
        or the tensors cannot be sent.

        What finds room in the store is written there; for the rest this waits for room for its tensors, which leave
        before the request does, straight to the ranks.
        """
        self.preparing.pop(request.request_id, None)
        ids = [request.request_id, *(child.request_id for child in request.children)]
        self.requests |= dict.fromkeys(ids, receiver)
        try:
            if request.media:
                request = await self.media_store.store_media(request)
            if any(item.patches is not None for item in request.media):
                await self._sender.send_request(request)
            else:
                self._send(request)
        except BaseException:
            self._forget(receiver)
            raise
        request_id, items = request.request_id, len(request.media)
        logger.debug(
            "%s sent to engine %d, with %d media items", request_id, self.number, items, extra=about(request_id)
        )

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Have the core end a sample. Its entry stays until the core's final output for it."""
        if request_id in self.requests:
            with contextlib.suppress(EngineError):
                self._send(Finish(request_id, reason))

    async def control(self, action: Literal["ping", "stats", "reset_caches"]) -> ControlReply | None:
        """Send a control request. None: the engine is down."""
        number = next(self._numbers)
        with contextlib.suppress(EngineError):
            reply: ControlReply = await self._ask(number, ControlRequest(number, action))
            return reply
        return None

    async def answers_ping(self, within: float) -> bool:
        """Whether the core and all its ranks answer a ping, at most one at a time, within so many seconds."""
        if self._ping is None or self._ping.done():
            self._ping = asyncio.ensure_future(self.control("ping"))
        reply = self._ping
        await asyncio.wait([reply], timeout=within)
        return reply.done() and reply.result() is not None

    def stop(self, refusal: EngineError, failure: EngineError) -> None:
        """Refuse new requests with `refusal`, and end those that the engine has with `failure`."""
        if self.stopped is not None:
            return
        self.stopped = refusal
        self._metrics.forget()
        for receiver in self.requests.values():
            receiver.fail(failure)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(refusal)
        self.requests = {}
        self._sender.queue.close_streams()

    def die(self) -> None:
        """It serves no more, or cannot be reached: as `stop`."""
        self.stop(EngineError(ENGINE_STOPPED), EngineError(ENGINE_DIED, 500))

    def close(self) -> None:
        self.die()
        self._socket.close()

    async def run(self) -> None:
        """Handle what the core sends, and watch whether the ranks can be reached, until cancelled. Raises
        EngineLost."""
        await asyncio.gather(self._lost, self._receive(), self._sender.queue.watch_end(self._lose))

    async def _receive(self) -> None:
        while True:
            body = decode(await self._socket.recv()).body
            if self.stopped is None:
                self._handle(body)

    def _handle(self, body: AnyMessage) -> None:
        match body:
            case Outputs():
                for output in body.outputs:
                    if (receiver := self.requests.get(output.request_id)) is not None:
                        if output.finish_reason is not None:
                            del self.requests[output.request_id]
                        receiver.receive(output)
                if body.consumed:
                    self._sender.queue.consumed(body.consumed)
            case MediaMiss(request_id=request_id, arrival=arrival):
                self._forget(self.requests[request_id]).fail(MediaNotSent(arrival))
            case Found(request_id=key) | Reserved(media_hash=key) | ControlReply(number=key):
                if isinstance(body, ControlReply) and body.stats is not None:
                    self._metrics.update(body.stats)
                if (reply := self._replies.get(key)) is not None and not reply.done():
                    reply.set_result(body)

    def _forget(self, receiver: OutputReceiver) -> OutputReceiver:
        """The core has no state of its request: there will be no final output."""
        self.requests = {each: other for each, other in self.requests.items() if other is not receiver}
        return receiver

    async def _ask(self, key: str | bytes | int, question: AnyMessage) -> Any:
        """The core's reply, which has `key`, too. Raises EngineError: the engine is down."""
        self._send(question)
        reply = self._replies[key] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        finally:
            del self._replies[key]

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
        """A connection to it has ended. If it has died the supervisor reports that, too, within `LOST_SECONDS`."""
        if self.stopped is None:
            logger.error("connection to engine %d lost: %s", self.number, why)
            self.die()
            asyncio.get_running_loop().call_later(LOST_SECONDS, self._check_lost)

    def _check_lost(self) -> None:
        if not self.end_is_expected and not self._lost.done():
            self._lost.set_exception(EngineLost("a running engine cannot be reached; this API server exits"))


class EngineClient:
    """All engines of this API server. `endpoints` of the cores, `queues` and `caches` have the same order."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        encoder: Encoder,
        endpoints: Sequence[str],
        queues: Sequence[TensorIpcSender],
        caches: Sequence[CacheAccess],
    ):
        name = sockets.identity(encoder.sender, encoder.incarnation)
        self._unsent: list[Callable[[EngineError], None]] = []  # what ends each request that no engine has yet
        self.engines = []
        for number, (endpoint, queue, cache) in enumerate(zip(endpoints, queues, caches, strict=True)):
            socket = sockets.connect_dealer(context, endpoint, name)
            self.engines.append(EngineHandle(number, socket, encoder, queue, cache))

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
        await asyncio.gather(*(engine.run() for engine in self.engines))

    @contextlib.contextmanager
    def end_if_none_runs(self, end: Callable[[EngineError], None]) -> Iterator[None]:
        """In this block no engine has the request yet that `end` ends: it is called when the last engine stops."""
        self._unsent.append(end)
        try:
            yield
        finally:
            self._unsent.remove(end)

    def choose(self, digest: bytes = b"") -> EngineHandle:
        """The engine for a request whose first item of media has this content digest. Raises EngineError: none runs.

        Without media the one with the fewest unfinished samples. With them, of those with up to `LOAD_MARGIN` more, the
        one that rendezvous hashing prefers (Thaler and Ravishankar 1998): so all API servers send the same media to the
        same engine, which caches them, without a message between the servers.
        """
        self.check()
        least = min(self._running, key=lambda running: running.load)
        return self.preferred(digest, least.load + LOAD_MARGIN) if digest else least

    def preferred(self, key: bytes, max_load: float = math.inf) -> EngineHandle:
        """The engine that rendezvous hashing gives `key`, of those with up to `max_load` samples. Raises EngineError:
        none runs."""
        self.check()
        running = [running for running in self._running if running.load <= max_load]
        return max(running, key=lambda running: hashlib.blake2b(key + bytes([running.number])).digest())

    async def refresh_metrics(self) -> None:
        """Bring the engines' metrics up to date; those of an engine that does not answer in time stay as they are."""
        asked = [asyncio.ensure_future(engine.control("stats")) for engine in self.engines]
        await asyncio.wait(asked, timeout=METRICS_SECONDS)

    async def reset_caches(self) -> None:
        """Empty the caches of every engine, but for what running requests use. Cancelling it stops the wait only.
        Raises EngineError: an engine is down."""
        await asyncio.gather(*(engine.control("reset_caches") for engine in self.engines))
        for engine in self.engines:
            engine.check()

    def peer_gone(self, sender: str) -> None:
        """A process has died: with a core or one of its workers, the engine and all of its requests end."""
        role, _, index = sender.partition(" ")
        if role in ("core", "worker"):
            engine = self.engines[int(index.partition(".")[0])]
            engine.end_is_expected = True
            engine.die()
            self._end_unsent()

    def drain(self) -> None:
        """This process exits when its last request has finished, and is not replaced before."""
        for engine in self.engines:
            engine.end_is_expected = True

    def stop(self, why: EngineError) -> None:
        """End all requests with `why`, and refuse new ones."""
        for engine in self.engines:
            engine.stop(why, why)
        self._end_unsent()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def _end_unsent(self) -> None:
        """Without effect while an engine runs."""
        if not self._running and (why := self.engines[0].stopped):
            for end in list(self._unsent):
                end(why)

    @property
    def _running(self) -> list[EngineHandle]:
        return [engine for engine in self.engines if engine.stopped is None]


def send_now(socket: zmq.asyncio.Socket, frame: bytes) -> None:
    """Queue `frame` at once, without yielding to other tasks. Raises zmq.ZMQError: the queue is full."""
    socket.send(frame, zmq.NOBLOCK).result()  # type: ignore[attr-defined] # with this flag a future that is done
