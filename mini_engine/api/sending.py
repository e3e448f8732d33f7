"""The way of a request and its tensors out of this process: tensors to the ranks, the request to their engine core.

Knows nothing of what is cached, or of answers. All of it belongs to the event loop's thread; only the copy of large
tensors into a message runs in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from mini_engine import metrics
from mini_engine.api.errors import EngineError, MediaNotSent
from mini_engine.api.media_store import INLINE_COPY_BYTES
from mini_engine.log import about
from mini_engine.messages import MessageId, NewRequest, Withdraw
from mini_engine.transport.base import Outgoing, TensorSender, TransportError, Unreachable
from mini_engine.transport.codec import Encoder

logger = logging.getLogger(__name__)


class RequestSender:
    """Sends requests to one engine. `senders` are in the order of use: each is the fallback of the one before it. One
    that takes CUDA tensors is for these alone; without it, or when it fails, they go by way of the host.

    `numbers` are those of this server's tensor messages. `send` takes a frame for the engine core, and raises
    EngineError when there is none any more; `on_memory` is called when the memory of tensors on their way has changed.
    """

    def __init__(
        self,
        encoder: Encoder,
        senders: Sequence[TensorSender],
        num_ranks: int,
        numbers: Iterator[int],
        send: Callable[[bytes], None],
        on_memory: Callable[[], None],
    ):
        self.senders = senders
        self._by_host = [sender for sender in senders if sender.takes == "cpu"]
        self._by_device = next((sender for sender in senders if sender.takes == "cuda"), None)
        self._encoder = encoder
        self._num_ranks = num_ranks
        self._numbers = numbers
        self._send = send
        self._on_memory = on_memory
        self._closed: EngineError | None = None

    async def submit(self, request: NewRequest, again: bool = False) -> None:
        """Hand over `request`, its tensors before it. Waits for room for them; cancelling it leaves nothing behind.

        Args:
            request: the patches of its items are tensors, or None.
            again: the first transport has lost its tensors.

        Raises:
            EngineError: the engine is gone, or no transport takes the tensors (MediaNotSent).
        """
        tensors = [item.patches for item in request.media if item.patches is not None]
        if tensors:
            try:
                await self._submit_with_tensors(request, tensors, again)
            finally:
                self._on_memory()
        else:
            self._send(self._encoder.encode(request))
        sent = request.request_id, len(tensors)
        logger.debug("%s sent, with %d media as tensors", *sent, extra=about(request.request_id))

    def consumed(self, messages: Iterable[MessageId]) -> None:
        """No rank will read these again."""
        for sender in self.senders:
            sender.consumed(messages)
        self._on_memory()

    def close(self, error: EngineError) -> None:
        """The engine is gone: give all memory back. Who is on the way gets `error`."""
        self._closed = error
        for sender in self.senders:
            sender.close()
        self._on_memory()

    async def _submit_with_tensors(self, request: NewRequest, tensors: Sequence[Any], again: bool) -> None:
        places = {tensor.device.type for tensor in tensors}
        if places != {"cpu"}:
            if places == {"cuda"} and not again and await self._submitted_by_device(request, tensors):
                return None
            metrics.ipc_fallbacks_total.labels("cuda_ipc").inc()
            request, tensors = await _on_host(request)
        senders = self._by_host[1:] if again and len(self._by_host) > 1 else self._by_host
        for sender, fallback in itertools.zip_longest(senders, senders[1:]):
            try:
                return await self._submit_by(sender, request, tensors)
            except _SendFailed as failed:
                if self._closed is not None:
                    raise self._closed from None
                level = logging.DEBUG if failed.is_known else logging.WARNING
                logger.log(
                    level, "%s: its tensors cannot go by %s (%s): %s",
                    request.request_id, sender.name, failed.reason, failed, extra=about(request.request_id),
                )  # fmt: skip
                if fallback is not None:
                    metrics.ipc_fallbacks_total.labels(failed.reason).inc()
        raise MediaNotSent()

    async def _submitted_by_device(self, request: NewRequest, tensors: Sequence[Any]) -> bool:
        if self._by_device is None:
            return False
        try:
            await self._submit_by(self._by_device, request, tensors)
        except _SendFailed as failed:
            if self._closed is not None:
                raise self._closed from None
            # That it found no slot is a matter of load.
            level = logging.DEBUG if failed.is_known or failed.reason == "no_memory" else logging.WARNING
            logger.log(
                level, "%s: its tensors go by way of the host (%s): %s", request.request_id, failed.reason, failed,
                extra=about(request.request_id),
            )  # fmt: skip
            return False
        return True

    async def _submit_by(self, sender: TensorSender, request: NewRequest, tensors: Sequence[Any]) -> None:
        """As a message of its own: one that could not be sent whole is withdrawn at once, so that its memory comes back
        whatever becomes of the request."""
        message = MessageId(self._encoder.incarnation, next(self._numbers))
        nbytes = sum(tensor.nbytes for tensor in tensors)
        with _failing_as("no_memory"):
            outgoing = await sender.reserve(message, nbytes, len(tensors))
        with _failing_as("copy_failed"):
            frame = await self._encode(request, outgoing, inline=sender.takes == "cpu" and nbytes <= INLINE_COPY_BYTES)
        # From here to the end nothing waits: the core must never hear of tensors that a cancellation kept from leaving.
        try:
            if self._closed is not None:
                raise self._closed
            with _failing_as("send_failed"):
                sent = outgoing.send()
        except _SendFailed:
            # Some ranks may have it, and its memory is not free until the core says so.
            self._send(self._encoder.encode(Withdraw([message])))
            raise
        except BaseException:
            outgoing.discard()
            raise
        self._send(frame)
        metrics.ipc_messages_total.labels(sender.name).inc(sent)
        metrics.ipc_bytes_total.labels(sender.name).inc(nbytes * sent // len(tensors))

    async def _encode(self, request: NewRequest, outgoing: Outgoing, inline: bool) -> bytes:
        """`request` as a frame, its tensors copied into `outgoing` (the codec calls it for each: `Packer.__call__`),
        which is discarded if this fails."""
        encode = partial(self._encoder.encode, request, outgoing)
        if inline:
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


async def _on_host(request: NewRequest) -> tuple[NewRequest, list[Any]]:
    """`request` with its tensors on the CPU, and these. In a thread, which waits for the device."""

    def copied() -> NewRequest:
        media = [
            item
            if item.patches is None
            else msgspec.structs.replace(item, patches=item.patches.cpu())
            for item in request.media
        ]
        return msgspec.structs.replace(request, media=media)

    try:
        moved = await asyncio.get_running_loop().run_in_executor(None, copied)
    except RuntimeError as error:  # torch's, of the device
        logger.error(
            "%s: its tensors cannot be copied from the device: %s", request.request_id, error,
            extra=about(request.request_id),
        )  # fmt: skip
        raise MediaNotSent() from error
    return moved, [item.patches for item in moved.media if item.patches is not None]


class _SendFailed(Exception):
    """A transport did not take a request's tensors; `reason` is one of `metrics.FALLBACK_REASONS`. `is_known`: from
    before this request, and the log was told then."""

    def __init__(self, reason: str, why: TransportError):
        super().__init__(str(why))
        self.is_known = isinstance(why, Unreachable)
        self.reason = "send_failed" if self.is_known else reason


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
