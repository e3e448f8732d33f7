"""A rank's media inputs: real streams, and a core that is a ROUTER here."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import zmq

from mini_engine.messages import MediaReady, MessageId, Step, TensorMessage
from mini_engine.transport.codec import Encoder, TransportError, decode
from mini_engine.transport.sockets import bind_router
from mini_engine.transport.stream_frames import pack_frame
from mini_engine.worker.media_inputs import MediaInputs
from tests.support.tensor_queue import API, ME, address_of, arena, connect, send

__all__ = ["arena", "connect"]
ONES = torch.ones(3, dtype=torch.uint8)


def ready(number: int, incarnation: int = API) -> MediaReady:
    return MediaReady(0, MessageId(incarnation, number))


def reports(core: zmq.Socket, count: int, seconds: float = 60) -> list[MediaReady]:
    """The next `count` reports, or what came of them in time."""
    bodies = []
    deadline = time.monotonic() + seconds
    while len(bodies) < count and core.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
        name, frame = core.recv_multipart()
        envelope = decode(frame)
        assert name == f"worker 0.0 media:{envelope.incarnation}".encode()
        bodies.append(envelope.body)
    return bodies


@pytest.fixture
def core(context, runtime) -> zmq.Socket:
    return bind_router(context, f"ipc://{runtime}/core")


@pytest.fixture
def inputs(context, runtime) -> Iterator[MediaInputs]:
    encoder = Encoder("worker 0.0", 100)
    with contextlib.closing(MediaInputs(address_of(runtime), f"ipc://{runtime}/core", encoder, context)) as inputs:
        yield inputs


async def test_life_of_a_message(inputs, core, connect) -> None:
    sender = await connect("torch_shm", 1)
    tensors = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((10, 100), (64, 48))]
    handles = await send(sender, *tensors)
    assert reports(core, 2) == [ready(1), ready(2)]
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(inputs.rows(handle, 0, len(tensor)), tensor)
        assert torch.equal(inputs.rows(handle, 3, 7), tensor[3:7])
    inputs.release([handles[0].message])
    with pytest.raises(KeyError):
        inputs.rows(handles[0], 0, 0)
    assert torch.equal(inputs.rows(handles[1], 0, 64), tensors[1])


async def test_the_core_drops_a_sender_and_the_end_of_its_stream_does_not(inputs, core, connect) -> None:
    """To all ranks in one step. Later messages of that sender are ignored."""
    sender, other = [await connect("torch_shm", 1, incarnation) for incarnation in (API, API + 1)]
    (handle,) = await send(sender, torch.arange(5, dtype=torch.uint8))
    assert reports(core, 1) == [ready(1)]
    sender.close_streams()
    assert reports(core, 1, seconds=0.1) == [] and inputs.rows(handle, 0, 5).tolist() == [0, 1, 2, 3, 4]
    inputs.drop_sender(API)
    sender = await connect("torch_shm", 1)
    await send(sender, ONES)
    (theirs,) = await send(other, ONES)
    assert reports(core, 2, seconds=0.2) == [ready(1, API + 1)]
    assert inputs.rows(theirs, 0, 3).tolist() == [1, 1, 1]
    with pytest.raises(KeyError):
        inputs.rows(handle, 0, 0)


async def test_a_tensor_that_cannot_be_read_fails_alone(inputs, core, connect, runtime) -> None:
    sender = await connect("torch_shm", 1)
    (handle,) = await send(sender, ONES)
    lost = MessageId(API, 7)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(address_of(runtime).tensor_ipc)
        peer.sendall(pack_frame(ME.encode(TensorMessage(lost.number, (3,), [(0, 1)]))))
        first, second = reports(core, 2)
    assert first == ready(1) and "out of file descriptors" in second.problem
    assert inputs.rows(handle, 0, 3).tolist() == [1, 1, 1]
    inputs.release([handle.message, lost])
    with pytest.raises(KeyError):
        inputs.rows(handle, 0, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_crashed_thread_fails_the_next_step_even_an_empty_one(context, connect, runtime, make_runner) -> None:
    where = address_of(runtime), f"ipc://{runtime}/core", Encoder("worker 0.0", 100), context
    with contextlib.closing(MediaInputs(*where, pin=lambda address, nbytes: 1 / 0)) as inputs:
        runner = make_runner(inputs)
        with pytest.raises(TransportError):
            await connect("torch_shm", 1)
        with pytest.raises(RuntimeError, match="thread crashed") as caught:
            for _ in range(1000):
                runner.execute(Step(1))
                await asyncio.sleep(0.01)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def test_a_thread_that_hangs_fails_the_next_step_even_an_empty_one(
    context, connect, runtime, make_runner
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    where = address_of(runtime), f"ipc://{runtime}/core", Encoder("worker 0.0", 100), context
    with contextlib.closing(MediaInputs(*where, timeout=0.2)) as inputs:
        await connect("torch_shm", 1)
        inputs.store = SimpleNamespace(pin_up_to=lambda _: hangs.set() or goes_on.wait())
        runner = make_runner(inputs)
        await asyncio.sleep(0.3)
        runner.execute(Step(1))  # a thread that waits for messages does not hang
        inputs.pin_store(1)
        assert await asyncio.to_thread(hangs.wait, 10)
        await asyncio.sleep(0.3)
        with pytest.raises(RuntimeError, match="hangs for 0.2 s"):
            runner.execute(Step(1))
        goes_on.set()
