"""A rank's media inputs: real streams, and a core that is a ROUTER here."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from mini_engine.messages import MediaReady, MessageId, Step, TensorHandle, TensorMessage
from mini_engine.transport.codec import Encoder, TransportError, decode
from mini_engine.transport.sockets import bind_router
from mini_engine.transport.stream_frames import pack_frame
from mini_engine.worker.media_inputs import MediaInputs
from tests.support.tensor_queue import API, ME, address_of, arena, connect, send

__all__ = ["arena", "connect"]
ONES = torch.ones(3, dtype=torch.uint8)


class CoreEnd:
    """The engine core, as far as a rank's receiver knows it."""

    def __init__(self, context: zmq.Context, runtime: Path):
        self.endpoint = f"ipc://{runtime}/core"
        self.socket = bind_router(context, self.endpoint)

    def reports(self, count: int, seconds: float = 60) -> list[MediaReady]:
        """The next `count` reports, or what came of them in time."""
        bodies = []
        deadline = time.monotonic() + seconds
        while len(bodies) < count and self.socket.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
            name, frame = self.socket.recv_multipart()
            envelope = decode(frame)
            assert name == f"worker 0.0 media:{envelope.incarnation}".encode()
            bodies.append(envelope.body)
        return bodies


def ready(number: int, incarnation: int = API) -> MediaReady:
    return MediaReady(0, MessageId(incarnation, number))


@pytest.fixture
def core(context, runtime) -> CoreEnd:
    return CoreEnd(context, runtime)


@pytest.fixture
def start(context, runtime, core) -> Iterator[Callable[..., MediaInputs]]:
    made: list[MediaInputs] = []

    def start_with(**more: object) -> MediaInputs:
        encoder = Encoder("worker 0.0", 100)
        made.append(MediaInputs(address_of(runtime), core.endpoint, encoder, context, **more))
        return made[-1]

    yield start_with
    for inputs in made:
        inputs.close()


def is_here(inputs: MediaInputs, handle: TensorHandle) -> bool:
    try:
        inputs.rows(handle, 0, 0)
    except KeyError:
        return False
    return True


async def test_life_of_a_message(start, core, connect) -> None:
    inputs, sender = start(), connect("torch_shm", 1)
    tensors = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((10, 100), (64, 48))]
    handles = await send(sender, *tensors)
    assert core.reports(2) == [ready(1), ready(2)]
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(inputs.rows(handle, 0, len(tensor)), tensor)
        assert torch.equal(inputs.rows(handle, 3, 7), tensor[3:7])
    inputs.release([handles[0].message])
    assert [is_here(inputs, handle) for handle in handles] == [False, True]


async def test_the_core_drops_a_sender_and_the_end_of_its_stream_does_not(start, core, connect) -> None:
    """To all ranks in one step. Later messages of that sender are ignored."""
    inputs = start()
    sender, other = (connect("torch_shm", 1, incarnation) for incarnation in (API, API + 1))
    (handle,) = await send(sender, torch.arange(5, dtype=torch.uint8))
    assert core.reports(1) == [ready(1)]
    sender.close_streams()
    assert core.reports(1, seconds=0.1) == [] and inputs.rows(handle, 0, 5).tolist() == [0, 1, 2, 3, 4]
    inputs.drop_sender(API)
    sender = connect("torch_shm", 1)
    await send(sender, ONES)
    (theirs,) = await send(other, ONES)
    assert core.reports(2, seconds=0.2) == [ready(1, API + 1)]
    assert not is_here(inputs, handle) and is_here(inputs, theirs)


async def test_a_tensor_that_cannot_be_read_fails_alone(start, core, connect, runtime) -> None:
    inputs, sender = start(), connect("torch_shm", 1)
    (handle,) = await send(sender, ONES)
    lost = MessageId(API, 7)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(address_of(runtime).tensor_ipc)
        peer.sendall(pack_frame(ME.encode(TensorMessage(lost.number, (3,), [(0, 1)])), descriptors=1))
        first, second = core.reports(2)
    assert first == ready(1) and "out of file descriptors" in second.problem
    assert inputs.rows(handle, 0, 3).tolist() == [1, 1, 1]
    inputs.release([handle.message, lost])
    assert not is_here(inputs, handle)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_crashed_thread_fails_the_next_step_even_an_empty_one(start, connect, make_runner) -> None:
    runner = make_runner(start(pin=lambda address, nbytes: 1 / 0))
    with pytest.raises(TransportError):
        connect("torch_shm", 1)
    with pytest.raises(RuntimeError, match="thread crashed") as caught:
        for _ in range(1000):
            runner.execute(Step(1))
            await asyncio.sleep(0.01)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
