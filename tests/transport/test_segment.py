"""Objects in a segment: what is written is what is read, and what is freed is refused."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_engine.messages import Segment, StoreHandle, StoreObject
from mini_engine.transport import segment as module
from mini_engine.transport.allocator import Allocator
from mini_engine.transport.base import TransportError
from mini_engine.transport.segment import HEADER_BYTES, MappedSegment, OwnedSegment, Slot

SIZE = 256 << 10
OWNER = 41
PROBE = StoreHandle(StoreObject(OWNER, 1), HEADER_BYTES, (0,), "uint8")


class Both:
    """A small segment, all of it allocated, and a mapping of it."""

    def __init__(self) -> None:
        self.owned = OwnedSegment(SIZE)
        self.owned.allocate(0, SIZE)
        self.mapped = MappedSegment(self.owned.fd, Segment(SIZE, SIZE, PROBE))
        self.allocator = Allocator()
        self.allocator.grow(SIZE)
        self.count = 0

    def slot(self, nbytes: int) -> Slot | None:
        offset = self.allocator.allocate(HEADER_BYTES + nbytes)
        if offset is None:
            return None
        self.count += 1
        return self.owned.slot(StoreObject(OWNER, self.count), offset, self.allocator.size(offset), nbytes)


@pytest.fixture
def both():
    made = Both()
    yield made
    made.owned.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5000, dtype=torch.int32).view(50, 100),
        torch.tensor([1.5, float("inf")], dtype=torch.bfloat16),
        torch.tensor(True),
        torch.empty(0, 48, dtype=torch.uint8),
        torch.arange(12, dtype=torch.int64).view(3, 4).t(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_a_tensor_is_read_as_it_was_written(both, tensor) -> None:
    handle = both.slot(tensor.nbytes).fill(tensor)
    view = both.mapped.view(handle)
    assert view.dtype == tensor.dtype and torch.equal(view, tensor)
    assert both.mapped.view(handle).data_ptr() == view.data_ptr(), "no copy"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=40), st.booleans())
def test_freed_objects_are_refused_and_the_others_whole(actions: list[tuple[bool, int]], scrub: bool) -> None:
    both = Both()
    live: dict[StoreHandle, tuple[Slot, int]] = {}
    dead: list[StoreHandle] = []
    for writes, number in actions:
        if writes and (slot := both.slot(number)) is not None:
            handle = slot.fill(torch.full((number,), both.count % 251, dtype=torch.uint8))
            live[handle] = slot, both.count % 251
        elif live:
            handle = list(live)[number % len(live)]
            slot, _ = live.pop(handle)
            slot.void(scrub)
            both.allocator.free(slot.offset)
            dead.append(handle)
        for handle, (_, value) in live.items():
            assert set(both.mapped.view(handle).tolist()) <= {value}
        for handle in dead:
            with pytest.raises(ValueError, match="is not in its segment"):
                both.mapped.view(handle)
    both.owned.close()


def test_scrubbing_changes_what_a_stale_view_reads(both) -> None:
    slots = [both.slot(1000) for _ in range(2)]
    views = [both.mapped.view(slot.fill(torch.ones(1000, dtype=torch.uint8))) for slot in slots]
    slots[0].void(scrub=True)
    slots[1].void(scrub=False)
    assert set(views[0].tolist()) == {0xFF} and set(views[1].tolist()) == {1}


def test_a_handle_that_does_not_match_is_refused(both) -> None:
    slot = both.slot(1000)
    handle = slot.fill(torch.zeros(1000, dtype=torch.uint8))

    def view(**fields: object) -> None:
        both.mapped.view(msgspec.structs.replace(handle, **fields))

    for number in (0, 2):
        with pytest.raises(ValueError, match="is not in its segment"):
            view(object=StoreObject(OWNER, number))
    with pytest.raises(ValueError, match="has 1000 bytes, its handle says 999"):
        view(shape=(999,))
    with pytest.raises(ValueError, match="outside"):
        view(shape=(SIZE,))
    with pytest.raises(ValueError, match="unknown dtype"):
        view(dtype="nonsense")
    for offset in (0, -64, SIZE + 1, 1 << 62):
        with pytest.raises(ValueError, match="outside"):
            view(offset=offset)
    with pytest.raises(ValueError, match="is not in its segment"):
        view(offset=handle.offset + 1)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.lists(st.integers(-(1 << 63), (1 << 64) - 1), max_size=9),
    st.sampled_from(["uint8", "int64", "bool", ""]),
)
def test_no_handle_does_more_than_fail(both, offset: int, shape: list[int], dtype: str) -> None:
    with pytest.raises(ValueError, match="object 1"):
        both.mapped.view(StoreHandle(StoreObject(OWNER, 1), offset, tuple(shape), dtype))


@pytest.mark.parametrize("nbytes, grown", [(SIZE + 4096, 4096), (SIZE - 1, 0), (SIZE, SIZE + 1), (SIZE, -1), (0, 0)])
def test_a_segment_is_what_its_owner_says(both, nbytes: int, grown: int) -> None:
    with pytest.raises(ValueError, match="not one of"):
        MappedSegment(both.owned.fd, Segment(nbytes, grown, PROBE))


@pytest.mark.parametrize("offset, nbytes", [(1, 4096), (-4096, 8192), (0, SIZE + 1), (SIZE, 1), (4096, -4096)])
def test_only_ranges_of_the_segment_grow(both, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="no range"):
        both.mapped.enter(offset, nbytes)


def test_nobody_can_resize_a_segment(both) -> None:
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(both.owned.fd, size)


def test_a_slot_takes_what_it_was_made_for(both) -> None:
    slot = both.slot(100)
    with pytest.raises(TransportError, match="99 bytes for a slot of 100"):
        slot.fill(torch.zeros(99, dtype=torch.uint8))
    with pytest.raises(TransportError, match="cannot be sent"):
        slot.fill(torch.zeros(25, dtype=torch.complex64))
    slot.void(scrub=False)
    with pytest.raises(TransportError, match="freed before it was filled"):
        slot.fill(torch.zeros(100, dtype=torch.uint8))


def test_a_slot_cannot_be_freed_while_a_thread_fills_it(both, monkeypatch) -> None:
    slot, begun, go_on = both.slot(100), threading.Event(), threading.Event()

    def slow(tensor: torch.Tensor, memory: torch.Tensor) -> None:
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(module, "copy_bytes", slow)
    thread = threading.Thread(target=slot.fill, args=[torch.zeros(100, dtype=torch.uint8)])
    thread.start()
    assert begun.wait(60)
    with pytest.raises(RuntimeError, match="while a thread writes it"):
        slot.void(scrub=True)
    go_on.set()
    thread.join()
    slot.void(scrub=True)


def test_ranges_are_pinned_once_mapped_and_let_go_before_the_mapping(both) -> None:
    """What CUDA has registered must not be unmapped under it."""
    calls: list[object] = []

    def pin(address: int, nbytes: int):
        calls.append(("pin", address, nbytes))

        def unpin() -> None:
            with open("/proc/self/maps") as maps:
                calls.append(("unpin", any(line.startswith(f"{base:x}-") for line in maps)))

        return unpin

    mapped = MappedSegment(both.owned.fd, Segment(SIZE, 8192, PROBE), pin)
    base = mapped._memory.data_ptr()
    mapped.enter(8192, 4096)
    view = mapped.view(both.slot(8).fill(torch.ones(8, dtype=torch.uint8)))
    del mapped
    assert calls == [("pin", base, 8192), ("pin", base + 8192, 4096)] and int(view.sum()) == 8
    del view
    assert calls[2:] == [("unpin", True), ("unpin", True)]
