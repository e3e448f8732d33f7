"""Ranks that no transport reaches for a while, over the real ones: clients are told to come again, and served then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from mini_engine.transport.base import TensorSender
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.direct_rpc import DirectRpcReceiver, DirectRpcSender

from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import RankAddress
from mini_engine.transport.codec import Encoder
from tests.api.peers import eventually
from tests.api.serving import Served, image, serve, words
from tests.api.test_app import metric
from tests.transport import test_direct_rpc
from tests.transport.test_tensor_ipc import MIB, Pair

ME = Encoder("api 0", 7)  # as `serve` has it


class Ranks:
    """Both of them, of one engine, at the ends of the transports that `serve` is to have."""

    def __init__(self, runtime: Path, context: zmq.Context, tensor_queue: bool):
        self._addresses = [
            RankAddress(0, rank, str(runtime / f"t{rank}")) for rank in (0, 1)
        ]
        self._context = context
        self.listen()
        self._direct = DirectRpcSender(ME, self._addresses, ByteCredit(16 * MIB), context)
        test_direct_rpc.probe(self._direct, self._receivers)
        self._queue = Pair(ME, self._addresses) if tensor_queue else None
        self.senders: list[TensorSender] = [self._direct] if self._queue is None else [self._queue.sender, self._direct]

    def listen(self) -> None:
        """By ZMQ alone."""
        self._receivers = [
            DirectRpcReceiver(Encoder("worker", 9), address, self._context) for address in self._addresses
        ]

    async def leave(self) -> None:
        """Until ZMQ's own thread has seen it."""
        for receiver in [*self._receivers, *(self._queue.receivers if self._queue is not None else [])]:
            receiver.close()
        await eventually(lambda: not any(link._socket.poll(0, zmq.POLLOUT) for _, link in self._direct._links))

    def close(self) -> None:
        for each in [self._direct, *self._receivers, *([] if self._queue is None else [self._queue])]:
            each.close()


@pytest.fixture(params=["direct_rpc alone", "after torch_shm"])
def ranks(request: pytest.FixtureRequest, runtime: Path, context: zmq.Context) -> Iterator[Ranks]:
    made = Ranks(runtime, context, tensor_queue=request.param == "after torch_shm")
    yield made
    made.close()


def test_who_cannot_be_handed_to_the_ranks_is_told_when_to_come_again(
    processor: MediaProcessor, tmp_path: Path, ranks: Ranks
) -> None:
    async def told(served: Served) -> bool:
        """Whether a request was refused, as it has to be; if not, it was answered."""
        failed = metric("request_success_total", finished_reason="error")
        response = await served.post(content=[image()])
        if response.status_code == 200:
            return False
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
        assert "could not be handed to the engine; send the request again" in error["message"]
        assert metric("request_success_total", finished_reason="error") - failed == 1
        return True

    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red"), transports=ranks.senders) as served:
            assert not await told(served)
            await ranks.leave()
            assert await told(served)
            assert not served.frontend.engines.engines[0].requests
            await eventually(lambda: all(sender.buffered_bytes == 0 for sender in ranks.senders))
            ranks.listen()
            async with asyncio.timeout(10):
                while await told(served):
                    pass

    asyncio.run(scenario())
