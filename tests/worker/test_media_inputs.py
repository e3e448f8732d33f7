"""A rank's media inputs: real streams, and a core that is a ROUTER here."""

from __future__ import annotations

import os
import time

import pytest
import torch

from mini_engine.messages import MediaFailed, MediaReady, Step, TensorHandle
from mini_engine.transport.codec import Encoder
from mini_engine.transport.sockets import connect_dealer
from mini_engine.worker.media_inputs import MediaInputs
from tests.worker.receiving import API, rank_address, ready, send

PLACEMENTS = ["torch_shm", "direct_rpc"]


def is_here(inputs: MediaInputs, handle: TensorHandle) -> bool:
    try:
        inputs.rows(handle, 0, 0)
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_life_of_a_message(inputs, core, runtime, connect, placement) -> None:
    sender = connect(placement, [rank_address(runtime)])
    tensors = [torch.arange(1000).view(10, 100), torch.randint(0, 256, (64, 48), dtype=torch.uint8)]
    handles = send(sender, *tensors)
    assert core.reports(2) == [ready(1), ready(2)]
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(inputs.rows(handle, 0, len(tensor)), tensor)
        assert torch.equal(inputs.rows(handle, 3, 7), tensor[3:7])
    inputs.release([handles[0].message])
    assert [is_here(inputs, handle) for handle in handles] == [False, True]
    sender.consumed([handles[0].message])
    (again,) = send(sender, tensors[0])
    assert core.reports(1) == [ready(3)]
    inputs.release([handles[1].message, again.message])
    assert not is_here(inputs, again)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_end_of_a_stream_drops_nothing(inputs, core, runtime, connect, placement) -> None:
    """Only the core says that a sender has died, to all ranks in one step."""
    sender = connect(placement, [rank_address(runtime)])
    (handle,) = send(sender, torch.arange(5))
    assert core.reports(1) == [ready(1)]
    sender.close_streams()
    assert core.reports(1, seconds=0.1) == [] and inputs.rows(handle, 0, 5).tolist() == [0, 1, 2, 3, 4]
    inputs.drop_sender(API)
    assert not is_here(inputs, handle)


def test_messages_of_a_dropped_sender_are_ignored(inputs, core, runtime, connect) -> None:
    sender, other = (connect("torch_shm", [rank_address(runtime)], incarnation) for incarnation in (API, API + 1))
    (handle,) = send(sender, torch.ones(3))
    assert core.reports(1) == [ready(1)]
    inputs.drop_sender(API)
    send(sender, torch.ones(3))
    (theirs,) = send(other, torch.ones(3))
    assert core.reports(2, seconds=0.2) == [ready(1, API + 1)]
    assert not is_here(inputs, handle) and is_here(inputs, theirs)


def test_a_tensor_that_cannot_be_brought_to_the_device_fails_alone(context, runtime, core, connect) -> None:
    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 3:
            raise RuntimeError("out of memory")
        return tensor * 2

    inputs = MediaInputs(rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context, to_device)
    inputs.start()
    sender = connect("torch_shm", [rank_address(runtime)])
    handle, failing = send(sender, torch.ones(3), torch.ones(4))
    first, second = core.reports(2)
    assert first == ready(1) and isinstance(second, MediaFailed) and "out of memory" in second.why
    assert inputs.rows(handle, 0, 3).tolist() == [2, 2, 2]
    inputs.release([handle.message, failing.message])
    assert not is_here(inputs, handle)
    inputs.close()


def test_arenas_are_pinned_as_far_as_they_are_used(context, runtime, core, connect) -> None:
    pinned: list[int] = []
    inputs = MediaInputs(
        rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context,
        pin=lambda address, nbytes: pinned.append(nbytes),
    )  # fmt: skip
    inputs.start()
    send(connect("torch_shm", [rank_address(runtime)]), torch.ones(3), torch.ones(4))
    assert core.reports(2) == [ready(1), ready(2)]
    inputs.close()
    assert pinned == [16 << 20], "the whole arena: it is smaller than a step of the mark"


def test_close_gives_everything_back(context, runtime, core, connect) -> None:
    connect_dealer(context, core.endpoint, b"warm").close()
    files, descriptors = set(os.listdir(runtime)), len(os.listdir("/proc/self/fd"))
    for incarnation in (100, 101):  # the second binds the same path
        me = Encoder("worker 0.0", incarnation)
        inputs = MediaInputs(rank_address(runtime), core.endpoint, me, 0, context)
        inputs.start()
        sender = connect("direct_rpc", [rank_address(runtime)], incarnation)
        send(sender, torch.ones(3))
        assert core.reports(1) == [ready(1, incarnation)]
        sender.close_streams()
        inputs.close()
    deadline = time.monotonic() + 60
    while set(os.listdir(runtime)) != files or len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < deadline  # ZMQ's own thread closes what was its
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crashed_thread_fails_the_next_step_even_an_empty_one(context, runtime, core, connect, make_runner) -> None:
    inputs = MediaInputs(
        rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context, to_device=lambda tensor: 1 / 0
    )
    inputs.start()
    send(connect("torch_shm", [rank_address(runtime)]), torch.ones(3))
    runner = make_runner(inputs)
    with pytest.raises(RuntimeError, match="thread has died") as caught:
        for _ in range(1000):
            runner.execute(Step(1))
            time.sleep(0.01)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    inputs.close()


def test_every_message_is_reported_once(inputs, core, runtime, connect) -> None:
    queue, direct = connect("torch_shm", [rank_address(runtime)]), connect("direct_rpc", [rank_address(runtime)], 42)
    for _ in range(50):
        send(queue, torch.ones(3), torch.ones(30_000))
        send(direct, torch.ones(30_000))
    reports = core.reports(151, seconds=2)
    assert len(reports) == 150 and all(isinstance(report, MediaReady) for report in reports)
    for incarnation, count in ((API, 100), (42, 50)):
        assert [each.message.number for each in reports if each.message.incarnation == incarnation] == list(
            range(1, count + 1)
        )
