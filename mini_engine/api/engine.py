"""One engine as this API server sees it: requests go out, tokens come in, tensors go past the core to the ranks.

Knows nothing of HTTP, text, or how media are made. All of it belongs to the event loop's thread; only the copy of large
tensors into a message runs in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from mini_engine import metrics
from mini_engine.api.errors import EngineError
from mini_engine.api.generation import Generation, Sample
from mini_engine.api.media_cache import MediaCopy
from mini_engine.messages import (
    Accepted,
    AnyMessage,
    Attach,
    Cached,
    CachesReset,
    Consumed,
    Evicted,
    Finish,
    FinishReason,
    MediaMiss,
    MessageId,
    NewRequest,
    Outputs,
    RequestOutput,
    ResetCaches,
    StoreHandle,
)
from mini_engine.transport.base import Outgoing, TensorSender, TransportError
from mini_engine.transport.codec import Encoder, decode

logger = logging.getLogger(__name__)

INLINE_COPY_BYTES = 4 << 20  # copies up to this size cost less than the way into a thread and back

ENGINE_STOPPED = "The engine that served this request has stopped; send it again later."
MEDIA_NOT_SENT = "The media of this request could not be handed to the engine; send the request again."

# Makes a request again, with the patches of those of its items that have one of these hashes.
Refill = Callable[[NewRequest, Collection[bytes]], Awaitable[NewRequest]]


class Engine:
    """One engine core and its ranks, seen from this API server.

    `requests` holds each sample of a request from before its tensors are reserved until the core's final output for it,
    which comes even for one that was aborted. `senders` are in the order of use: each is the fallback of the one before
    it. `numbers` are those of this server's tensor messages.
    """

    def __init__(
        self,
        number: int,
        socket: zmq.asyncio.Socket,
        encoder: Encoder,
        senders: Sequence[TensorSender],
        media: MediaCopy,
        numbers: Iterator[int],
        on_memory: Callable[[], None],
    ):
        self.number = number
        self.senders = senders
        self.media = media
        self.requests: dict[str, Sample] = {}
        self.preparing = 0  # samples of requests that chose this engine and are not in `requests` yet
        self.stopped: str | None = None  # what clients are told once it serves no more
        self._socket = socket
        self._encoder = encoder
        self._numbers = numbers
        self._on_memory = on_memory
        self._figures = metrics.EngineFigures(number)
        self._resets: dict[int, asyncio.Future[None]] = {}
        self._send(encoder.encode(Attach()))

    @property
    def load(self) -> int:
        """Samples that the engine has to finish, or will be sent."""
        return len(self.requests) + self.preparing

    async def submit(self, request: NewRequest, refill: Refill) -> Generation:
        """Hand `request` to the engine, its media's patches still tensors, or None where `media` names the hash.

        Waits for room for the tensors, which leave before the request does, straight to the ranks; and, if there are
        media, until the engine has accepted the request. Where the engine has dropped media meanwhile, `refill` makes
        the request again and it is sent anew. Cancelling it leaves nothing behind.

        Raises:
            EngineError: the engine is gone, or no transport takes the tensors.
            MediaError: by `refill`.
        """
        generation = Generation(self, [request.request_id, *(sibling.request_id for sibling in request.siblings)])
        self.requests |= {sample.request_id: sample for sample in generation.samples}
        try:
            while True:
                await self._submit(request)
                generation.at_engine = True
                missing = await generation.missing() if request.media else None
                if missing is None:
                    return generation
                request = await self._refilled(request, missing, refill)
        except BaseException:
            if generation.at_engine:
                generation.abort()
            else:
                self._forget(generation)
            raise

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Tell the core to end a request. Its entry stays until the core's final output for it."""
        if request_id in self.requests:
            with contextlib.suppress(EngineError):  # then it has ended with its engine
                self._send(self._encoder.encode(Finish(request_id, reason)))

    def reset_caches(self, number: int) -> asyncio.Future[None]:
        """Ask the core to forget what its caches hold; `number` has not been used before. Done when it has answered.

        Raises:
            EngineError: the engine is gone; so does the future.
        """
        self._send(self._encoder.encode(ResetCaches(number)))
        done = self._resets[number] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda _: self._resets.pop(number, None))
        return done

    def stop(self, why: str) -> None:
        """End all requests and refuse new ones: the engine is gone, or this server is going. Clients are told `why`."""
        if self.stopped is not None:
            return
        self.stopped = why
        self.media.clear()
        requests, self.requests = self.requests, {}
        for sample in requests.values():
            sample.fail(EngineError(why, engine_gone=True))
        for reset in list(self._resets.values()):
            if not reset.done():
                reset.set_exception(EngineError(why, engine_gone=True))
        for sender in self.senders:
            sender.close()
        self._on_memory()

    def close(self) -> None:
        """Stop, and close the socket."""
        self.stop(ENGINE_STOPPED)
        self._socket.close()

    async def receive(self) -> None:
        """Take what the core sends, until cancelled."""
        while True:
            body = decode(await self._socket.recv()).body
            if self.stopped is None:
                self._handle(body)

    def _handle(self, body: AnyMessage) -> None:
        match body:
            case Outputs(outputs=outputs, stats=stats, counters=counters):
                for output in outputs:
                    self._on_output(output)
                self._figures.update(stats, counters)
            case Consumed(messages=messages):
                for sender in self.senders:
                    sender.consumed(messages)
                self._on_memory()
            case Cached(items=items):
                self.media.add(items)
            case Evicted(hashes=hashes):
                self.media.drop(hashes)
            case Accepted(request_ids=request_ids):
                self._on_accepted(request_ids)
            case MediaMiss(request_id=request_id, hashes=hashes):
                self._on_miss(request_id, hashes)
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

    async def _refilled(self, request: NewRequest, missing: Collection[bytes], refill: Refill) -> NewRequest:
        """`request` with more tensors than before: so there is an end to the misses of one request."""
        unsent = {item.media_hash for item in request.media if item.patches is None}
        if not unsent.intersection(missing):
            logger.error("%s: engine %d misses media that it was sent", request.request_id, self.number)
            raise EngineError(MEDIA_NOT_SENT)
        self._figures.resends.inc()
        return await refill(request, unsent.intersection(missing))

    async def _submit(self, request: NewRequest) -> None:
        try:
            if tensors_of(request):
                await self._submit_with_tensors(request, MessageId(self._encoder.incarnation, next(self._numbers)))
            else:
                self._send(self._encoder.encode(request))
        finally:
            self._on_memory()

    async def _submit_with_tensors(self, request: NewRequest, message: MessageId) -> None:
        for sender, fallback in itertools.zip_longest(self.senders, self.senders[1:]):
            try:
                return await self._submit_by(sender, request, message)
            except _SendFailed as failed:
                self._check_running()
                logger.warning(
                    "%s: tensors cannot go to engine %d by %s (%s): %s",
                    request.request_id, self.number, sender.name, failed.reason, failed,
                )  # fmt: skip
                if fallback is not None:
                    metrics.ipc_fallbacks_total.labels(failed.reason).inc()
        raise EngineError(MEDIA_NOT_SENT)

    async def _submit_by(self, sender: TensorSender, request: NewRequest, message: MessageId) -> None:
        tensors = tensors_of(request)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        with _failing_as("no_memory"):
            outgoing = await sender.reserve(message, nbytes)
        with _failing_as("copy_failed"):
            frame = await self._encode(request, outgoing, nbytes)
        # From here to the end nothing waits: the core must never hear of tensors that a cancellation kept from leaving.
        try:
            self._check_running()
            with _failing_as("send_failed"):
                sent = outgoing.send()
        except BaseException:
            outgoing.discard()
            raise
        self._send(frame)
        metrics.ipc_messages_total.labels(sender.name).inc(sent)
        metrics.ipc_bytes_total.labels(sender.name).inc(nbytes * sent // len(tensors))

    async def _encode(self, request: NewRequest, outgoing: Outgoing, nbytes: int) -> bytes:
        """`request` as a frame, its tensors copied into `outgoing`, which is discarded if this fails."""
        encode = partial(self._encoder.encode, request, outgoing)
        if nbytes <= INLINE_COPY_BYTES:
            try:
                return encode()
            except BaseException:
                outgoing.discard()
                raise
        copying = asyncio.get_running_loop().run_in_executor(None, encode)
        try:
            return await asyncio.shield(copying)
        except BaseException:
            # Not before the thread is done: until then it writes into the memory.
            copying.add_done_callback(partial(_discard, outgoing))
            raise

    def _send(self, frame: bytes) -> None:
        self._check_running()
        try:
            send_now(self._socket, frame)
        except zmq.ZMQError as error:
            logger.error("engine %d takes no more messages (%s): treated as dead", self.number, error)
            self.stop(ENGINE_STOPPED)
            self._check_running()

    def _check_running(self) -> None:
        if self.stopped is not None:
            raise EngineError(self.stopped, engine_gone=True)


def tensors_of(request: NewRequest) -> list[Any]:
    """The patches in `request` that are still tensors."""
    return [item.patches for item in request.media if not isinstance(item.patches, StoreHandle | None)]


def send_now(socket: zmq.asyncio.Socket, frame: bytes) -> None:
    """Queue `frame` at once, without giving way to other tasks.

    Raises:
        zmq.ZMQError: the queue is full.
    """
    sent: Any = socket.send(frame, zmq.NOBLOCK)  # with this flag pyzmq returns a future that is done
    sent.result()


class _SendFailed(Exception):
    """A transport did not take a request's tensors; `reason` is one of `metrics.FALLBACK_REASONS`."""

    def __init__(self, reason: str, why: TransportError):
        super().__init__(str(why))
        self.reason = reason


@contextlib.contextmanager
def _failing_as(reason: str) -> Iterator[None]:
    try:
        yield
    except TransportError as error:
        raise _SendFailed(reason, error) from error


def _discard(outgoing: Outgoing, copying: asyncio.Future[bytes]) -> None:
    if not copying.cancelled():
        copying.exception()  # seen: asyncio would report it as never retrieved
    outgoing.discard()
