"""Sends requests with tensors to one engine: the tensors to its ranks, the request to its engine core.

Frees the pages of a request that is aborted before it is sent; those of others when the ranks have read them. It knows
neither caches nor answers. It runs in the event loop's thread; only large copies run in another.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from mini_engine import metrics
from mini_engine.log import about
from mini_engine.messages import NewRequest, TensorHandle
from mini_engine.protocol.api_errors import EngineError, MediaNotSent
from mini_engine.transport.arena import RequestTooLarge
from mini_engine.transport.codec import Encoder, OOBTensorConsumer, TransportError
from mini_engine.transport.tensor_ipc import OutgoingTensors, TensorIpcSender

logger = logging.getLogger(__name__)

INLINE_COPY_BYTES = 1 << 20  # above it, tenths of a millisecond, tensors are copied in a thread


class RequestSender:
    """Sends requests to one engine, their tensors by `queue`. `send_frame` takes an encoded message for the engine
    core. It and `check` raise EngineError when the engine is down."""

    def __init__(
        self, encoder: Encoder, queue: TensorIpcSender, send_frame: Callable[[bytes], None], check: Callable[[], None]
    ):
        self.queue = queue
        self._encoder = encoder
        self._send_frame, self._check = send_frame, check
        queue.count_held = _count_held

    async def send_request(self, request: NewRequest) -> None:
        """Send `request` and its tensors: the patches of its items are a tensor, of one at least, or None where the
        engine has them by hash. Waits for memory for them; cancelling it leaves nothing behind. Raises EngineError: the
        engine is down; memory for the tensors is short (MediaNotSent); or they are larger than the limit, a 400.
        """
        tensors: list[Any] = [item.patches for item in request.media if item.patches is not None]
        nbytes, devices = sum(tensor.nbytes for tensor in tensors), {tensor.device.type for tensor in tensors}
        if devices == {"cuda"} and (slots := self.queue.reserve_slots(tensors)) is not None:
            try:
                frame = await self._encode(request, slots, slots, inline=False)
            except TransportError as error:
                logger.warning("%s: CUDA transport failed, tensors copied to the host: %s", request.request_id, error)
            else:
                return self._send_all(request, slots, frame, "torch_shm")
        metrics.ipc_fallbacks_total.labels("cuda_ipc").inc(devices != {"cpu"})
        try:
            outgoing = await self.queue.reserve(tensors)
            inline = devices == {"cpu"} and nbytes <= INLINE_COPY_BYTES
            frame = await self._encode(request, outgoing, partial(_place_on_host, outgoing), inline)
        except RequestTooLarge:
            problem = f"The media of this request take {nbytes} bytes as tensors, more than --mm-ipc-memory-bytes"
            remedy = "send fewer, shorter or smaller media."
            raise EngineError(f"{problem}; {remedy}", 400, "media_too_large", "messages") from None
        except TransportError as error:
            logger.warning("%s: cannot send tensors: %s", request.request_id, error, extra=about(request.request_id))
            self._check()
            raise MediaNotSent() from error
        self._send_all(request, outgoing, frame, self.queue.placement)

    async def _encode(
        self, request: NewRequest, outgoing: OutgoingTensors, consumer: OOBTensorConsumer, inline: bool
    ) -> bytes:
        """`request` as a frame. The codec has `consumer` copy each tensor to `outgoing`, which is freed on failure, or
        if the engine is down by then."""
        encode, copying = partial(self._encoder.encode, request, consumer), None
        try:
            if inline:
                frame = encode()
            else:
                copying = asyncio.get_running_loop().run_in_executor(None, encode)
                frame = await asyncio.shield(copying)
            self._check()
            return frame
        except BaseException:
            if copying is None:
                outgoing.discard()
            else:
                copying.add_done_callback(partial(_free_aborted, outgoing))  # until then the thread writes there
            raise

    def _send_all(self, request: NewRequest, outgoing: OutgoingTensors, frame: bytes, transport: str) -> None:
        """The frames of all tensors, then the request. Nothing here waits: ranks would hold tensors without a request
        until this process ends."""
        try:
            self.queue.send_tensors(outgoing)
            self._send_frame(frame)
        except EngineError:  # the engine counts as stopped: this process ends, unless the engine has
            raise
        except BaseException:
            logger.critical("%s: tensors sent, request not sent; exiting", request.request_id, exc_info=True)
            logging.shutdown()
            os._exit(1)
        nbytes = sum(message.nbytes for message in outgoing.messages)
        metrics.ipc_messages_total.labels(transport).inc(len(outgoing.messages) * self.queue.num_ranks)
        metrics.ipc_bytes_total.labels(transport).inc(nbytes * self.queue.num_ranks)


def _count_held(nbytes: int, tensors: int) -> None:
    metrics.ipc_buffered_bytes.inc(nbytes)
    metrics.ipc_buffered_tensors.inc(tensors)


def _free_aborted(outgoing: OutgoingTensors, copying: asyncio.Future[bytes]) -> None:
    """Free the pages of a request that ends while a thread copies to them: the copy has ended."""
    if not copying.cancelled():
        copying.exception()  # retrieved, or asyncio would log it
    outgoing.discard()


def _place_on_host(outgoing: OutgoingTensors, tensor: Any) -> TensorHandle:
    try:
        return outgoing(tensor.cpu())
    except RuntimeError as error:  # torch's, of the device
        raise TransportError(f"cannot copy a tensor from {tensor.device}: {error}") from error
