"""How a request and its tensors leave this process: tensors to the ranks, the request to their engine core.

Knows nothing of what is cached, or of answers. All of it belongs to the event loop's thread; only the copy of large
tensors runs in another.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from mini_engine import metrics
from mini_engine.api.errors import EngineError, MediaNotSent, MediaTooLarge
from mini_engine.log import about
from mini_engine.messages import MediaItem, MessageId, NewRequest
from mini_engine.transport.arena import RequestTooLarge
from mini_engine.transport.codec import Encoder, TransportError
from mini_engine.transport.tensor_ipc import Outgoing, TensorIpcSender

logger = logging.getLogger(__name__)

INLINE_COPY_BYTES = 1 << 20  # above it, tenths of a millisecond, tensors are copied in a thread


class RequestSender:
    """Sends requests to one engine, their tensors by `queue`.

    `send_frame` takes an encoded message for the engine core, and raises EngineError when the engine is gone;
    `on_memory` is called when the memory of tensors on their way has changed.
    """

    def __init__(
        self,
        encoder: Encoder,
        queue: TensorIpcSender,
        send_frame: Callable[[bytes], None],
        on_memory: Callable[[], None],
    ):
        self.queue = queue
        self._encoder = encoder
        self._send_frame = send_frame
        self._on_memory = on_memory
        self._closed: EngineError | None = None
        self._waits: set[asyncio.Timeout] = set()  # for room

    async def submit(self, request: NewRequest) -> None:
        """Hand over `request` and its tensors: the patches of its items are a tensor, or None where the engine has them
        by hash. Waits for room for them; cancelling it leaves nothing behind.

        Raises:
            EngineError: the engine is gone; there is no memory for the tensors (MediaNotSent), or can never be
                (MediaTooLarge).
        """
        tensors = _tensors_of(request)
        try:
            if not tensors:
                self._send_frame(self._encoder.encode(request))
            elif not await self._submit_by_slots(request, tensors):
                await self._submit_by_host(request, tensors)
        finally:
            self._on_memory()
        logger.debug("%s sent, with %d tensors", request.request_id, len(tensors), extra=about(request.request_id))

    def consumed(self, messages: Iterable[MessageId]) -> None:
        """No rank will read these again."""
        self.queue.consumed(messages)
        self._on_memory()

    def close(self, error: EngineError) -> None:
        """The engine is gone: requests that wait for room end with `error`."""
        self._closed = error
        for wait in list(self._waits):
            wait.reschedule(0)
        self.queue.close_streams()
        self._on_memory()

    async def _submit_by_host(self, request: NewRequest, tensors: list[Any]) -> None:
        if any(tensor.device.type != "cpu" for tensor in tensors):
            metrics.ipc_fallbacks_total.labels("cuda_ipc").inc()
            request = await _on_host(request)
            tensors = _tensors_of(request)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        try:
            outgoing = await self._reserve(tensors)
            frame = await self._encode(request, outgoing, inline=nbytes <= INLINE_COPY_BYTES)
        except RequestTooLarge:
            raise MediaTooLarge(nbytes) from None
        except TransportError as error:
            logger.warning(
                "%s: its tensors cannot be sent: %s", request.request_id, error, extra=about(request.request_id)
            )
            raise MediaNotSent() from error
        self._send_all(request, outgoing, frame, self.queue.placement)

    async def _reserve(self, tensors: list[Any]) -> Outgoing:
        """Room for them. The wait ends with the engine."""
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    return await self.queue.reserve(tensors)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            assert self._closed is not None
            raise self._closed from None

    async def _submit_by_slots(self, request: NewRequest, tensors: list[Any]) -> bool:
        if any(tensor.device.type != "cuda" for tensor in tensors):
            return False
        outgoing = self.queue.reserve_slots(tensors)
        if outgoing is None:  # a matter of load
            return False
        try:
            frame = await self._encode(request, outgoing, inline=False)
        except TransportError as error:
            logger.warning(
                "%s: its tensors go by way of the host: %s", request.request_id, error, extra=about(request.request_id)
            )
            return False
        self._send_all(request, outgoing, frame, "torch_shm")
        return True

    async def _encode(self, request: NewRequest, outgoing: Outgoing, inline: bool) -> bytes:
        """`request` as a frame, its tensors copied to where the ranks find them (the codec calls `outgoing` for each of
        them), which are given back if this fails."""
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
            copying.add_done_callback(partial(_discard, outgoing))  # until then the thread writes there
            raise

    def _send_all(self, request: NewRequest, outgoing: Outgoing, frame: bytes, transport: str) -> None:
        """The frames of all tensors, then the request. Nothing here waits: ranks that have a tensor whose request never
        comes would hold it until this process ends."""
        if self._closed is not None:
            outgoing.discard()
            raise self._closed
        try:
            sent = self.queue.send_tensors(outgoing)
            self._send_frame(frame)
        except EngineError:  # the engine counts as stopped, for which this process ends unless the engine has
            raise
        except BaseException:
            logger.critical("%s: its tensors were sent, and it cannot be; exiting", request.request_id, exc_info=True)
            logging.shutdown()
            os._exit(1)
        nbytes = sum(message.nbytes for message in outgoing.messages)
        metrics.ipc_messages_total.labels(transport).inc(sent)
        metrics.ipc_bytes_total.labels(transport).inc(nbytes * sent // len(outgoing.messages))


def _tensors_of(request: NewRequest) -> list[Any]:
    return [item.patches for item in request.media if item.patches is not None]


async def _on_host(request: NewRequest) -> NewRequest:
    """`request` with its tensors on the CPU. In a thread, which waits for the device."""

    def on_host(item: MediaItem) -> MediaItem:
        patches: Any = item.patches
        return item if patches is None else msgspec.structs.replace(item, patches=patches.cpu())

    def copied() -> NewRequest:
        return msgspec.structs.replace(request, media=[on_host(item) for item in request.media])

    try:
        return await asyncio.get_running_loop().run_in_executor(None, copied)
    except RuntimeError as error:  # torch's, of the device
        logger.error("%s: the device fails to copy its tensors: %s", request.request_id, error)
        raise MediaNotSent() from error


def _discard(outgoing: Outgoing, copying: asyncio.Future[bytes]) -> None:
    if not copying.cancelled():
        copying.exception()  # seen: asyncio would report it as never retrieved
    outgoing.discard()
