"""A request's tensors that lie on a device: straight from there, or by way of the host, which is counted."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from mini_engine import metrics
from mini_engine.api.errors import EngineError
from mini_engine.api.sending import RequestSender
from mini_engine.messages import MediaItem, NewRequest, SamplingParams
from mini_engine.transport.codec import Encoder, TransportError, decode
from tests.api.peers import MemoryTransport


class OnDevice:
    """A tensor that says it lies on a device."""

    device = torch.device("cuda", 0)
    broken = False

    def __init__(self, value: int):
        self._host = torch.full((1, 4), value, dtype=torch.uint8)
        self.nbytes, self.shape = 4, self._host.shape

    def cpu(self) -> torch.Tensor:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._host


class Sending:
    """A sender of requests over what keeps the tensors it is given."""

    def __init__(self, slots: int = 0):
        self.queue = MemoryTransport(slots=slots)
        self.frames: list[bytes] = []
        sender = RequestSender(Encoder("api 0", 7), self.queue, self.frames.append, on_memory=lambda: None)
        self.submit, self.close = sender.submit, sender.close

    @property
    def carried(self) -> list[Any]:
        return list(self.queue.held.values())


def request(*patches: Any) -> NewRequest:
    media = [MediaItem("image", 0, 1, (1, 2, 2), None, each, b"%d" % n) for n, each in enumerate(patches)]
    return NewRequest("r", [5], SamplingParams(max_tokens=8, seed=1), media)


def by_the_host() -> float:
    return metrics.ipc_fallbacks_total.labels("cuda_ipc")._value.get()


def test_they_go_straight_from_the_device(monkeypatch) -> None:
    sending, before = Sending(slots=2), by_the_host()
    threads = []
    monkeypatch.setattr(sending.queue, "fail", lambda stage: threads.append(threading.current_thread()))
    tensors = [OnDevice(1), OnDevice(2)]
    asyncio.run(sending.submit(request(tensors[0], None, tensors[1])))
    assert sending.carried == tensors and by_the_host() == before
    assert [item.patches.message.number for item in decode(sending.frames[0]).body.media if item.patches] == [1, 2]
    # Small as they are: filling a slot waits for the device, and the event loop must not.
    assert threads and all(thread is not threading.main_thread() for thread in threads)


def test_without_a_slot_they_go_by_the_host() -> None:
    sending, before = Sending(slots=1), by_the_host()
    asyncio.run(sending.submit(request(OnDevice(3), None, OnDevice(4))))
    assert [tensor.tolist() for tensor in sending.carried] == [[[3] * 4], [[4] * 4]]
    assert by_the_host() - before == 1 and len(sending.frames) == 1


def test_a_slot_that_cannot_be_filled_is_given_back(monkeypatch, caplog) -> None:
    sending, before = Sending(slots=1), by_the_host()
    failures = iter([TransportError("CUDA: broken")])

    def fail(stage: str) -> None:
        if stage == "copy" and (error := next(failures, None)):
            raise error

    monkeypatch.setattr(sending.queue, "fail", fail)
    asyncio.run(sending.submit(request(OnDevice(3))))
    assert [tensor.tolist() for tensor in sending.carried] == [[[3] * 4]]
    assert by_the_host() - before == 1 and "tensors copied to the host: CUDA: broken" in caplog.text


def test_tensors_of_two_kinds_go_by_the_host() -> None:
    sending, before = Sending(slots=2), by_the_host()
    asyncio.run(sending.submit(request(OnDevice(1), torch.full((1, 4), 9, dtype=torch.uint8))))
    assert [tensor.tolist() for tensor in sending.carried] == [[[1] * 4], [[9] * 4]]
    assert by_the_host() - before == 1


def test_tensors_of_the_host_never_go_to_the_device() -> None:
    sending, before = Sending(slots=2), by_the_host()
    sending.queue.slots = 0
    asyncio.run(sending.submit(request(torch.ones(1, 4, dtype=torch.uint8))))
    assert len(sending.carried) == 1 and by_the_host() == before


def test_a_device_that_fails_fails_the_request_alone(monkeypatch) -> None:
    monkeypatch.setattr(OnDevice, "broken", True)
    sending = Sending()
    with pytest.raises(EngineError, match="could not be handed") as caught:
        asyncio.run(sending.submit(request(OnDevice(1))))
    assert "CUDA" not in str(caught.value) and sending.frames == []
