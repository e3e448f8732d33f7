"""A request's tensors that lie on a device: straight from there, or by way of the host, which is counted."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch

from mini_engine import metrics
from mini_engine.api.errors import EngineError
from mini_engine.api.sending import RequestSender
from mini_engine.messages import MediaItem, MessageId, NewRequest, SamplingParams, Withdraw
from mini_engine.transport.codec import Encoder, decode
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

    def __init__(self, *transports: MemoryTransport):
        self.transports = transports
        self.frames: list[bytes] = []
        sender = RequestSender(
            Encoder("api 0", 7), transports, 2, itertools.count(1), self.frames.append, on_memory=lambda: None
        )
        self.submit, self.close = sender.submit, sender.close

    def carried(self) -> list[list[Any]]:
        """What each transport holds, flat."""
        return [[tensor for each in t.held.values() for tensor in each.tensors] for t in self.transports]


def request(*patches: Any) -> NewRequest:
    media = [MediaItem("image", 0, 1, (1, 2, 2), None, each, b"%d" % n) for n, each in enumerate(patches)]
    return NewRequest("r", [5], SamplingParams(max_tokens=8, seed=1), media)


def by_the_host() -> float:
    return metrics.ipc_fallbacks_total.labels("cuda_ipc")._value.get()


def test_they_go_straight_from_the_device(monkeypatch) -> None:
    device, queue = MemoryTransport(takes="cuda"), MemoryTransport()
    threads = []
    fail = device.fail
    monkeypatch.setattr(
        device, "fail", lambda stage: (threads.append((stage, threading.current_thread())), fail(stage))
    )
    sending, before = Sending(device, queue), by_the_host()
    tensors = [OnDevice(1), OnDevice(2)]
    asyncio.run(sending.submit(request(tensors[0], None, tensors[1])))
    assert sending.carried() == [tensors, []] and by_the_host() == before
    assert [item.patches.index for item in decode(sending.frames[0]).body.media if item.patches is not None] == [0, 1]
    # Small as they are: packing waits for the device, and the event loop must not.
    assert all(thread is not threading.main_thread() for stage, thread in threads if stage == "copy")
    assert device.sent and queue.sent == []


@pytest.mark.parametrize("stage", [None, "reserve", "copy", "send"])
def test_without_a_slot_they_go_by_the_host(stage) -> None:
    device, queue = MemoryTransport(takes="cuda"), MemoryTransport()
    device.fail_at = stage
    sending, before = Sending(*([device] if stage else []), queue), by_the_host()
    asyncio.run(sending.submit(request(OnDevice(3), None, OnDevice(4))))
    assert [tensor.tolist() for tensor in sending.carried()[-1]] == [[[3] * 4], [[4] * 4]]
    assert device.sent == [] and by_the_host() - before == 1 and not device.held
    told = [type(decode(frame).body) for frame in sending.frames]
    assert told == ([Withdraw, NewRequest] if stage == "send" else [NewRequest])


@pytest.mark.parametrize(("stage", "level"), [("reserve", "DEBUG"), ("send", "WARNING")])
def test_that_no_slot_was_idle_is_no_warning(caplog, stage, level) -> None:
    device = MemoryTransport(takes="cuda")
    device.fail_at = stage
    with caplog.at_level("DEBUG"):
        asyncio.run(Sending(device, MemoryTransport()).submit(request(OnDevice(3))))
    assert [record.levelname for record in caplog.records if "by way of the host" in record.message] == [level]


def test_tensors_of_two_kinds_go_by_the_host() -> None:
    """One message has one buffer: a request is served rather than refused for it."""
    sending, before = Sending(MemoryTransport(takes="cuda"), MemoryTransport()), by_the_host()
    asyncio.run(sending.submit(request(OnDevice(1), torch.full((1, 4), 9, dtype=torch.uint8))))
    assert [tensor.tolist() for tensor in sending.carried()[1]] == [[[1] * 4], [[9] * 4]]
    assert sending.carried()[0] == [] and by_the_host() - before == 1


def test_what_was_lost_goes_by_another_way() -> None:
    sending, before = Sending(MemoryTransport(takes="cuda"), MemoryTransport(), MemoryTransport()), by_the_host()
    asyncio.run(sending.submit(request(OnDevice(1)), again=True))
    assert [len(each) for each in sending.carried()] == [0, 0, 1] and by_the_host() - before == 1


def test_tensors_of_the_host_never_go_to_the_device() -> None:
    sending = Sending(MemoryTransport(takes="cuda"), queue := MemoryTransport(), direct := MemoryTransport())
    asyncio.run(sending.submit(request(torch.ones(1, 4, dtype=torch.uint8))))
    queue.fail_at = "send"
    asyncio.run(sending.submit(request(torch.ones(1, 4, dtype=torch.uint8))))
    assert [len(each) for each in sending.carried()] == [0, 1, 1] and len(direct.sent) == 1


def test_a_device_that_fails_fails_the_request_alone(monkeypatch) -> None:
    monkeypatch.setattr(OnDevice, "broken", True)
    sending = Sending(MemoryTransport())
    with pytest.raises(EngineError, match="could not be handed") as caught:
        asyncio.run(sending.submit(request(OnDevice(1))))
    assert "CUDA" not in str(caught.value) and sending.frames == []


def test_a_device_that_fails_after_a_slot_could_not_be_sent_holds_no_slot(monkeypatch) -> None:
    """A rank may have been sent it: the core is told that no request comes."""
    monkeypatch.setattr(OnDevice, "broken", True)
    device = MemoryTransport(takes="cuda")
    device.fail_at = "send"
    sending = Sending(device, MemoryTransport())
    with pytest.raises(EngineError, match="could not be handed"):
        asyncio.run(sending.submit(request(OnDevice(1))))
    assert [decode(frame).body for frame in sending.frames] == [Withdraw([MessageId(7, 1)])]
