"""The tensor queue between two ends in one process: placements, order, queued frames, refusals, what is released."""

import asyncio
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mini_engine.messages import DeviceSlots, MessageId, TensorMessage
from mini_engine.transport.arena import Arena, WritableMemory
from mini_engine.transport.codec import Encoder, TransportError
from mini_engine.transport.cuda_memory import StagingSlots
from mini_engine.transport.page_allocator import PAGE_BYTES
from mini_engine.transport.shared_memory import create_sparse
from mini_engine.transport.stream_frames import pack_frame
from mini_engine.transport.tensor_ipc import Failed, Received, TensorIpcReceiver, TensorIpcSender
from tests.support.processes import eventually
from tests.support.tensor_queue import ME, PATIENCE, Held, HostStaging, Rank, address_of, pump, send, unlimited

PLACEMENTS = ["torch_shm", "direct_rpc"]


async def arrival(rank: Rank) -> Received | Failed:
    return await asyncio.to_thread(rank.next)  # the loop writes what is queued meanwhile


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def whole(received: Received | Failed) -> torch.Tensor:
    assert isinstance(received, Received), received
    return received.rows(0, received.shape[0])


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_tensors_arrive_at_every_rank_as_they_were_sent(placement: str, ranks: Any, connect: Any) -> None:
    both = ranks()
    sender = await connect(placement)
    for tensor in (noise(300, 7), noise(1, 5), noise(3, 100, 1000), noise(10)):
        (handle,) = await send(sender, tensor)
        for rank in both:
            received = await arrival(rank)
            assert received.message == handle.message
            assert torch.equal(whole(received), tensor)
            assert torch.equal(received.rows(1, 2) if len(tensor) > 1 else tensor[1:2], tensor[1:2])
        sender.consumed([handle.message])
    assert sender.held == {}


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_a_blocked_rank_gets_its_frames_later_and_the_other_goes_on(
    placement: str, ranks: Any, connect: Any, arena: Arena
) -> None:
    blocked, other = ranks()
    sender = await connect(placement)
    blocked.pause()
    messages: list[MessageId] = []
    for number in range(2000 if placement == "torch_shm" else 10):
        nbytes = 1 if placement == "torch_shm" else 1 << 20
        (handle,) = await send(sender, torch.full((nbytes,), number % 251, dtype=torch.uint8))
        messages.append(handle.message)
        if number >= 100:
            sender.consumed([messages[number - 100]])  # room for the next; the blocked rank reads other bytes
        assert (await arrival(other)).message == messages[-1]
    blocked.resume.set()
    got = [await arrival(blocked) for _ in messages]
    assert [received.message for received in got] == messages
    if placement == "direct_rpc":
        assert [int(whole(received)[0]) for received in got] == list(range(10))


async def test_discarded_messages_free_their_pages(ranks: Any, connect: Any, arena: Arena) -> None:
    ranks(1)
    sender = await connect("torch_shm", 1)
    outgoing = await sender.reserve([noise(400_000), noise(20)])
    outgoing(noise(400_000))
    assert [message.nbytes for message in sender.held.values()] == [400_000, 20] and arena.pages.num_used == 8
    outgoing.discard()
    outgoing.discard()
    assert sender.held == {} and arena.pages.num_used == 0
    sender.consumed([MessageId(ME.incarnation, 1), MessageId(ME.incarnation, 99)])  # unknown: ignored


async def test_the_end_of_a_stream_is_reported_once_and_frames_after_it_are_dropped(
    ranks: Any, connect: Any, arena: Arena
) -> None:
    ended: list[str] = []
    first, second = ranks()
    sender = await connect("torch_shm")
    watching = asyncio.create_task(sender.watch_end(ended.append))
    second.close()
    await asyncio.to_thread(second.thread.join)
    sent = await send(sender, noise(3))
    assert await asyncio.to_thread(eventually, lambda: bool(ended))
    sent += await send(sender, noise(3))
    assert [(await arrival(first)).message for _ in sent] == [handle.message for handle in sent]
    assert len(ended) == 1 and ended[0].startswith("tensor stream to rank 1 ended: ")
    used = arena.pages.num_used
    outgoing = await sender.reserve([noise(3)])
    sender.close_streams()
    assert len(sender.held) == 1 and arena.pages.num_used == used + 1
    outgoing.discard()
    assert arena.pages.num_used == used, "a rank that lives may read what was sent"
    await watching


# --- probes ----------------------------------------------------------------------------------------------------------


async def test_a_probe_names_the_rank_and_the_reason(ranks: Any, runtime: Path, arena: Arena) -> None:
    (rank,) = ranks(1)
    sender = TensorIpcSender(ME, [rank.address, address_of(runtime, 1)], arena)
    with pytest.raises(TransportError, match="^torch_shm to rank 1 of engine 0: cannot connect: "):
        await sender.probe("torch_shm", 0.1)
    rank.pause()
    with pytest.raises(TransportError, match="rank 0 of engine 0: connected, but no answer to the probe in time"):
        await sender.probe("direct_rpc", 0.1)
    rank.resume.set()
    assert arena.pages.num_used == 0


async def test_a_probe_that_arrives_with_other_bytes_fails(runtime: Path, arena: Arena) -> None:
    def answer_wrongly() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 20)
            connection.send(pack_frame(ME.encode(TensorMessage(1, (1,)))))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address_of(runtime).tensor_ipc)
        listener.listen()
        thread = threading.Thread(target=answer_wrongly)
        thread.start()
        with pytest.raises(TransportError, match="wrong checksum of the probe"):
            await TensorIpcSender(ME, [address_of(runtime)], arena).probe("torch_shm", PATIENCE)
        thread.join()


async def test_a_lost_descriptor_fails_messages_and_the_next_stream_is_served(ranks: Any, connect: Any) -> None:
    (rank,) = ranks(1)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(rank.address.tensor_ipc)
        head = ME.encode(TensorMessage(7, (3,), extents=[(0, 1)]))
        peer.sendall(pack_frame(head))
        failed = await arrival(rank)
    assert isinstance(failed, Failed) and failed.message == MessageId(ME.incarnation, 7)
    assert failed.why == "descriptor of the arena lost: out of file descriptors"
    await connect("torch_shm", 1)


# --- what is held ----------------------------------------------------------------------------------------------------


def test_a_stream_that_ends_at_any_byte_leaves_the_whole_frames_and_nothing_else(runtime: Path, held: Held) -> None:
    """As that of a sender that is killed: the kernel closes its end."""
    address, fd = address_of(runtime), create_sparse(4 * PAGE_BYTES)
    WritableMemory(fd).write([(2, 1)], torch.arange(8, dtype=torch.uint8))
    first = pack_frame(ME.encode(TensorMessage(1, (8,), extents=[(2, 1)])))
    frames = first + pack_frame(ME.encode(TensorMessage(2, (5,))), 5) + b"\1\2\3\4\5"
    receiver = TensorIpcReceiver(Encoder("worker 0.0", 100), address)
    for cut in range(len(frames) + 1):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(address.tensor_ipc)
            if cut:
                socket.send_fds(peer, [frames[:cut]], [fd])
        arrivals: list[Received | Failed] = []
        pump(receiver, arrivals.append, PATIENCE)  # accepts it
        while len(receiver.descriptors()) > 1:  # its end is there to be read
            pump(receiver, arrivals.append, PATIENCE)
        numbers = [arrival.message.number for arrival in arrivals]
        assert numbers == ([1, 2] if cut == len(frames) else [1] if cut >= len(first) else []), cut
        assert all(isinstance(arrival, Received) for arrival in arrivals)
        if numbers:
            assert arrivals[0].rows(0, 8).tolist() == list(range(8))
        del arrivals
    receiver.close_streams()
    os.close(fd)
    assert held.is_baseline()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_descriptors_and_mappings_are_back_once_nothing_of_the_arena_is_viewed(
    placement: str, runtime: Path, held: Held
) -> None:
    last = noise(50)

    async def scenario() -> torch.Tensor:
        both = [Rank(address_of(runtime, number)) for number in (0, 1)]
        arena = Arena(16 << 20, unlimited)
        sender = TensorIpcSender(ME, [rank.address for rank in both], arena)
        await sender.probe(placement, PATIENCE)
        for _ in range(3):
            messages = [handle.message for handle in await send(sender, noise(400_000), last)]
            for rank in both:
                received = [await arrival(rank) for _ in messages]
                assert [item.message for item in received] == messages
            sender.consumed(messages)
        sender.close_streams()
        arena.close_memory()
        for rank in both:
            rank.close()
        return received[1].rows(10, 20)

    rows = asyncio.run(scenario())
    assert held.mappings() == (placement == "torch_shm") and torch.equal(rows, last[10:20])
    del rows
    assert held.is_baseline()


# --- staging slots, in host memory -----------------------------------------------------------------------------------


class HostMapped:
    def __init__(self, slots: DeviceSlots):
        self.nbytes = slots.nbytes

    def fetch(self, slot: int, nbytes: int) -> Any:
        memory = HostStaging.memory[(slot - 1) * self.nbytes :][:nbytes].clone()

        def rows(shape: tuple[int, ...], first: int, stop: int) -> torch.Tensor:
            return memory.view(shape)[first:stop]

        return SimpleNamespace(rows=rows, synchronize=lambda: None)

    def close(self) -> None:
        pass


async def test_slots_bring_tensors_and_are_used_again_once_consumed(ranks: Any, arena: Arena) -> None:
    (rank,) = ranks(1, map_slots=HostMapped)
    sender = TensorIpcSender(ME, [rank.address], arena)
    await sender.probe("torch_shm", PATIENCE, StagingSlots(HostStaging(), 3, 1 << 17))
    assert sender.reserve_slots([noise(1 + (1 << 17))]) is None, "too large for a slot"
    assert sender.reserve_slots([noise(1)] * 4) is None, "more than there are"
    tensors = [noise(100, 3), noise(5)]
    outgoing = sender.reserve_slots(tensors)
    handles = [outgoing(tensor) for tensor in tensors]
    sender.send_tensors(outgoing)
    for tensor in tensors:
        received = await arrival(rank)
        assert torch.equal(whole(received), tensor) and received.copied is not None
        assert torch.equal(received.rows(1, 3), tensor[1:3])
    discarded = sender.reserve_slots([noise(1)])
    assert sender.reserve_slots([noise(1)]) is None, "all slots are in use"
    discarded.discard()
    sender.consumed([handle.message for handle in handles])
    assert sender.reserve_slots([noise(1)] * 3) is not None and arena.pages.num_used == 0
    sender.close_streams()


@pytest.mark.parametrize("case", ["no device", "not mapped", "too small"])
async def test_slots_whose_probe_fails_are_not_used(case: str, ranks: Any, arena: Arena) -> None:
    def refuse(_: DeviceSlots) -> Any:
        raise TransportError("cudaErrorInvalidDevice")

    map_slots, nbytes, reason = {
        "no device": (None, 1 << 17, "this rank has no CUDA device"),
        "not mapped": (refuse, 1 << 17, "cudaErrorInvalidDevice"),
        "too small": (HostMapped, 512, "a staging slot of 512 bytes is too small for a probe"),
    }[case]
    (rank,) = ranks(1, map_slots=map_slots)
    sender = TensorIpcSender(ME, [rank.address], arena)
    with pytest.raises(TransportError, match=reason):
        await sender.probe("torch_shm", PATIENCE, StagingSlots(HostStaging(), 3, nbytes))
    await sender.probe("torch_shm", PATIENCE)
    assert sender.reserve_slots([noise(1)]) is None
    sender.close_streams()
