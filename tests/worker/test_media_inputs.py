"""A rank's media inputs: real sockets, a core that is a ROUTER here, and real rank processes where it matters."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_engine.messages import (
    MediaFailed,
    MediaReady,
    MessageId,
    Step,
    TensorHandle,
    TensorLayout,
    TensorMessage,
)
from mini_engine.transport.codec import Encoder
from mini_engine.transport.packing import Failed, Received
from mini_engine.transport.sockets import connect_dealer
from mini_engine.worker import media_inputs
from mini_engine.worker.media_inputs import MediaInputs, MediaMissing
from tests.worker.receiving import API, eventually, in_table, rank_address, ready, send


@pytest.mark.parametrize("transport", ["torch_shm", "direct_rpc"])
def test_life_of_a_message(inputs, core, runtime, connect, transport) -> None:
    sender = connect(transport, [rank_address(runtime)])
    tensors = [torch.arange(1000).view(10, 100), torch.randint(0, 256, (64, 48), dtype=torch.uint8)]
    handles = send(sender, 1, *tensors)
    assert core.reports(1) == [ready(1)]
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(inputs.tensor(handle), tensor)
    assert in_table(inputs) == (2, sum(tensor.nbytes for tensor in tensors))
    assert inputs.release([MessageId(API, 1)]) == []
    assert in_table(inputs) == (0, 0)
    with pytest.raises(MediaMissing):
        inputs.tensor(handles[0])
    sender.consumed([MessageId(API, 1)])
    send(sender, 2, tensors[0])
    assert core.reports(1) == [ready(2)]


@pytest.mark.parametrize("transport", ["torch_shm", "direct_rpc"])
def test_a_message_has_room_for_the_gaps_between_any_number_of_tensors(inputs, core, runtime, connect, transport):
    """Of a size at which neither transport has a buffer with room to spare."""
    tensors = [torch.full((736,), number % 251, dtype=torch.uint8) for number in range(600)]
    handles = send(connect(transport, [rank_address(runtime)]), 1, *tensors)
    assert core.reports(1) == [ready(1)]
    assert all(torch.equal(inputs.tensor(handle), tensor) for handle, tensor in zip(handles, tensors, strict=True))


def test_a_handle_that_does_not_fit_is_an_error(inputs, core, runtime, connect) -> None:
    (handle,) = send(connect("torch_shm", [rank_address(runtime)]), 1, torch.zeros(2, 3))
    assert core.reports(1) == [ready(1)]
    message = handle.message
    for wrong in ((1, (2, 3), "float32"), (-1, (2, 3), "float32"), (0, (3, 2), "float32"), (0, (2, 3), "int32")):
        with pytest.raises(ValueError):
            inputs.tensor(TensorHandle(message, *wrong))
    with pytest.raises(MediaMissing):
        inputs.tensor(TensorHandle(MessageId(API + 1, 1), 0, (2, 3), "float32"))


def test_a_second_copy_by_the_other_transport_is_ignored(inputs, core, runtime, connect) -> None:
    queue, direct = (connect(transport, [rank_address(runtime)]) for transport in ("torch_shm", "direct_rpc"))
    (handle,) = send(queue, 1, torch.ones(3))
    assert core.reports(1) == [ready(1)]
    send(direct, 1, torch.zeros(3))
    send(direct, 2, torch.zeros(3))
    assert core.reports(1) == [ready(2)]
    assert inputs.tensor(handle).tolist() == [1, 1, 1]
    inputs.release([MessageId(API, 2)])
    send(queue, 2, torch.zeros(3))  # its first copy has come and gone
    send(queue, 3, torch.zeros(3))
    assert core.reports(1) == [ready(3)]
    assert in_table(inputs)[0] == 2


def test_what_came_by_a_connection_that_broke_stays_and_the_next_one_goes_on(inputs, core, runtime, connect) -> None:
    """The end of a connection is no sender's end: only the core says that, to all ranks in one step."""
    sender = connect("torch_shm", [rank_address(runtime)])
    ((_, link),) = sender._links
    (first,) = send(sender, 1, torch.ones(3))
    assert core.reports(1) == [ready(1)]
    assert inputs.release([MessageId(API, 3)]) == [MessageId(API, 3)]
    link._socket.shutdown(socket.SHUT_RDWR)
    (second,) = send(sender, 2, torch.zeros(3))
    send(sender, 3, torch.zeros(3))
    send(sender, 4, torch.zeros(3))
    assert core.reports(2) == [ready(2), ready(4)]
    assert inputs.tensor(first).tolist() == [1, 1, 1] and inputs.tensor(second).tolist() == [0, 0, 0]
    assert inputs.release([MessageId(API, number) for number in (1, 2, 4)]) == [] and in_table(inputs) == (0, 0)


def test_a_tombstone_outlives_later_messages_of_the_other_connection(inputs, core, runtime, connect) -> None:
    queue, direct = (connect(transport, [rank_address(runtime)]) for transport in ("torch_shm", "direct_rpc"))
    assert inputs.release([MessageId(API, 1)]) == [MessageId(API, 1)]  # so the core does not wait for it
    send(queue, 2, torch.zeros(3))
    assert core.reports(1) == [ready(2)]
    send(direct, 1, torch.zeros(3))
    send(direct, 3, torch.zeros(3))
    assert core.reports(1) == [ready(3)]
    assert in_table(inputs)[0] == 2
    send(queue, 1, torch.zeros(3))
    send(queue, 4, torch.zeros(3))
    assert core.reports(1) == [ready(4)]


def test_tombstones_are_bounded(inputs, monkeypatch) -> None:
    monkeypatch.setattr(media_inputs, "REMEMBERED", 10)
    inputs.release([MessageId(API, number) for number in [1, *range(1, 100), 95]])
    assert list(inputs._senders[API].void) == [90, 91, 92, 93, 94, 96, 97, 98, 99, 95]


def test_a_dropped_sender_is_void_for_good(inputs, core, runtime, connect) -> None:
    sender = connect("torch_shm", [rank_address(runtime)])
    (handle,) = send(sender, 1, torch.ones(3))
    assert core.reports(1) == [ready(1)]
    inputs.drop_sender(API)
    send(sender, 2, torch.ones(3))
    inputs.release([MessageId(API, 3)])
    assert core.reports(1, seconds=0.1) == [] and in_table(inputs) == (0, 0) and inputs._senders == {}
    with pytest.raises(MediaMissing):
        inputs.tensor(handle)


def test_a_bad_message_is_reported(inputs, core, runtime, context) -> None:
    peer = connect_dealer(context, rank_address(runtime).direct_rpc, b"peer")
    head = TensorMessage(4, 64, [TensorLayout(0, (65,), "uint8")])
    peer.send_multipart([Encoder("api 0", API).encode(head), b"x" * 64])
    (report,) = core.reports(1)
    peer.close()
    assert isinstance(report, MediaFailed) and report.message == MessageId(API, 4) and "outside" in report.why


def test_the_device_hook(context, runtime, core, connect) -> None:
    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 3:
            raise RuntimeError("out of memory")
        return tensor * 2

    inputs = MediaInputs(rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context, to_device)
    inputs.start()
    sender = connect("torch_shm", [rank_address(runtime)])
    (handle,) = send(sender, 1, torch.ones(3))
    send(sender, 2, torch.ones(4))
    first, second = core.reports(2)
    assert first == ready(1) and isinstance(second, MediaFailed) and "out of memory" in second.why
    assert inputs.tensor(handle).tolist() == [2, 2, 2]
    inputs.close()


@pytest.mark.parametrize("started", [True, False])
def test_close_gives_everything_back(context, runtime, core, connect, started) -> None:
    connect_dealer(context, core.endpoint, b"warm").close()
    files, descriptors = set(os.listdir(runtime)), len(os.listdir("/proc/self/fd"))
    for incarnation in (100, 101):  # the second binds the same paths
        me = Encoder("worker 0.0", incarnation)
        inputs = MediaInputs(rank_address(runtime), core.endpoint, me, 0, context)
        if started:
            inputs.start()
            sender = connect("torch_shm", [rank_address(runtime)])
            send(sender, 1, torch.ones(3))
            assert core.reports(1) == [ready(1)]
            sender.close()
        inputs.close()
        inputs.close()
    deadline = time.monotonic() + 60
    while set(os.listdir(runtime)) != files or len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < deadline  # ZMQ's own thread closes what was its
        time.sleep(0.01)


def test_an_idle_receiver_costs_nothing(inputs, runtime, connect) -> None:
    connect("torch_shm", [rank_address(runtime)])
    connect("direct_rpc", [rank_address(runtime)])
    clock = time.pthread_getcpuclockid(inputs._thread.ident)

    def used() -> float:
        start = time.clock_gettime(clock)
        time.sleep(0.3)
        return time.clock_gettime(clock) - start

    assert eventually(lambda: used() == 0, 20), "once it has served the probes, the thread does not run at all"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_ends_the_next_step_even_an_empty_one(inputs, runtime, connect, make_runner, monkeypatch):
    sender = connect("torch_shm", [rank_address(runtime)])
    monkeypatch.setattr(inputs, "_handle", lambda arrival: 1 / 0)
    send(sender, 1, torch.ones(3))
    inputs._thread.join(60)
    with pytest.raises(RuntimeError, match="thread has died") as caught:
        make_runner(inputs).execute(Step(1))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_message_that_is_released_on_its_way_to_the_device_is_not_reported(context, runtime, core) -> None:
    first, second = MessageId(API, 1), MessageId(API, 2)
    said: list[MessageId] = []

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        if not said:
            said.extend(inputs.release([first]))
        return tensor

    inputs = MediaInputs(rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context, to_device)
    for message in (first, second):
        inputs._handle(Received(message, [torch.ones(2)]))
    assert said == [first] and core.reports(1) == [ready(2)]
    assert in_table(inputs)[0] == 1
    inputs.close()


EVENTS = st.tuples(st.sampled_from(["arrive", "fail", "release", "drop"]), st.integers(1, 2), st.integers(1, 5))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS, max_size=40))
def test_any_order_of_arrivals_and_releases(runtime, context, core, events: list[tuple[str, int, int]]) -> None:
    """Against the plainest model: arrivals by either transport, releases and deaths in any order."""
    inputs = MediaInputs(rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context)
    reports: list[MediaReady | MediaFailed] = []
    inputs._report = reports.append
    table: set[MessageId] = set()
    void: set[MessageId] = set()
    gone: set[int] = set()
    expected: list[MediaReady | MediaFailed] = []
    for kind, incarnation, number in events:
        message = MessageId(incarnation, number)
        wanted = message not in table | void and incarnation not in gone
        if kind == "arrive":
            inputs._handle(Received(message, [torch.ones(2)]))
            if wanted:
                table.add(message)
                expected.append(ready(number, incarnation))
        elif kind == "fail":
            inputs._handle(Failed(message, "why"))
            expected += [MediaFailed(0, message, "why")] if wanted else []
        elif kind == "release":
            reported = any(report.message == message for report in expected)
            unreported = [message] if incarnation not in gone and (message in void or not reported) else []
            assert inputs.release([message]) == unreported
            table.discard(message)
            void.add(message)
        else:
            inputs.drop_sender(incarnation)
            gone.add(incarnation)
            table = {each for each in table if each.incarnation != incarnation}
    assert reports == expected and in_table(inputs) == (len(table), 8 * len(table))
    for message in table:
        assert inputs.tensor(TensorHandle(message, 0, (2,), "float32")).tolist() == [1, 1]
    inputs.close()
