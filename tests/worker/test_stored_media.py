"""A rank's `MediaInputs` and the stores of API servers: attached, viewed, and unmapped when the core says so."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from mini_engine.messages import MessageId, RankAddress, StoreObject
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.shm_store import ShmStoreWriter
from mini_engine.transport.tensor_ipc import TensorIpcSender
from mini_engine.worker.media_inputs import MediaInputs, MediaMissing
from tests.transport.store_ranks import eventually
from tests.worker.receiving import in_table

MIB = 1 << 20
API = 41


@pytest.fixture
def address() -> Iterator[RankAddress]:
    path = Path(tempfile.mkdtemp(prefix="mini-"))
    yield RankAddress(0, 0, str(path / "t0"), f"ipc://{path}/d0")
    shutil.rmtree(path)


@pytest.fixture
def make_inputs(address) -> Iterator[Callable[..., MediaInputs]]:
    context = zmq.Context()
    made: list[MediaInputs] = []

    def make(**more: object) -> MediaInputs:
        core = address.direct_rpc.replace("/d0", "/core")  # nobody listens there: a store reports nothing
        made.append(MediaInputs(address, core, Encoder("worker 0.0", 100), 0, context, **more))
        made[-1].start()
        return made[-1]

    yield make
    for inputs in made:
        inputs.close()
    context.destroy(linger=0)


@pytest.fixture
def inputs(make_inputs) -> MediaInputs:
    return make_inputs()


@pytest.fixture
def connect(address) -> Iterator[Callable[..., ShmStoreWriter]]:
    made: list[ShmStoreWriter] = []

    def make(incarnation: int = API) -> ShmStoreWriter:
        made.append(ShmStoreWriter(Encoder("api 0", incarnation), [address], 2 * MIB))
        made[-1].connect(60)
        return made[-1]

    yield make
    for writer in made:
        writer.close()


def mapped() -> int:
    """Mappings of readers in this process; none that earlier tests left to the collector."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:mini-engine" in line and " r--s " in line for line in lines)


def until_disconnected(inputs: MediaInputs) -> None:
    """The thread may be about to let go of what a connection had."""
    assert eventually(lambda: not inputs._queue._connections)


def test_an_object_is_viewed_where_it_lies(inputs, connect) -> None:
    writer = connect()
    tensor = torch.randint(0, 256, (64, 48), dtype=torch.uint8)
    handle = writer.write(tensor)
    view = inputs.stored(handle)
    assert torch.equal(view, tensor) and inputs.stored(handle).data_ptr() == view.data_ptr()
    assert in_table(inputs) == (0, 0), "it is no message"
    with pytest.raises(MediaMissing):
        inputs.stored(msgspec.structs.replace(handle, object=StoreObject(API + 1, handle.object.number)))
    with pytest.raises(ValueError, match="its handle says"):
        inputs.stored(msgspec.structs.replace(handle, shape=(64, 47)))
    writer.free(handle.object)
    with pytest.raises(ValueError, match="is not in its segment"):
        inputs.stored(handle)


def test_a_store_outlives_its_owner_until_the_core_says_so(inputs, connect) -> None:
    before = mapped()
    writer = connect()
    handle = writer.write(torch.full((1000,), 3, dtype=torch.uint8))
    writer.close()
    until_disconnected(inputs)
    inputs.drop_sender(API)
    assert set(inputs.stored(handle).tolist()) == {3}
    view = inputs.stored(handle)
    inputs.drop_segments([API, 77])
    with pytest.raises(MediaMissing):
        inputs.stored(handle)
    assert set(view.tolist()) == {3} and mapped() == before + 1, "the last view keeps it"
    del view
    assert eventually(lambda: mapped() == before)
    inputs.drop_segments([API])


def test_a_segment_after_its_owner_was_dropped_is_refused(inputs, connect) -> None:
    before = mapped()
    inputs.drop_segments([API])
    with pytest.raises(TransportError, match="its owner is gone"):
        connect()
    until_disconnected(inputs)
    assert eventually(lambda: mapped() == before)
    assert connect(API + 1).write(torch.ones(3)) is not None


def test_one_segment_for_each_owner(inputs, connect) -> None:
    writer = connect()
    handle = writer.write(torch.full((1000,), 1, dtype=torch.uint8))
    with pytest.raises(TransportError, match="another one here"):
        connect()
    assert set(inputs.stored(handle).tolist()) == {1}


def test_the_tensor_queue_goes_on_beside_it(inputs, connect, address) -> None:
    writer = connect()
    sender = TensorIpcSender(Encoder("api 0", API), [address], ByteCredit(16 * MIB))
    sender.probe(60)
    handle = writer.write(torch.ones(10))
    inputs.release([MessageId(API, 1)])
    sender.close()
    assert float(inputs.stored(handle).sum()) == 10


def test_what_has_memory_is_pinned_until_it_is_unmapped(make_inputs, connect) -> None:
    ranges: dict[int, int] = {}

    def pin(address: int, nbytes: int) -> Callable[[], object]:
        ranges[address] = nbytes
        return lambda: ranges.pop(address)

    inputs = make_inputs(pin=pin)
    writer = connect()
    view = inputs.stored(writer.write(torch.ones(8)))
    ((start, nbytes),) = ranges.items()
    assert nbytes == 2 * MIB and start <= view.data_ptr() < start + nbytes
    writer.close()
    until_disconnected(inputs)
    inputs.drop_segments([API])
    assert ranges
    del view
    assert eventually(lambda: not ranges)


def test_closing_lets_go_of_all_stores(inputs, connect) -> None:
    before = mapped()
    connect()
    connect(API + 1)
    assert mapped() == before + 2
    inputs.close()
    assert mapped() == before
