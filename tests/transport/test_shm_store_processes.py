"""The store with readers in processes of their own, and with a writer that is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from mini_engine.messages import StoreHandle
from mini_engine.transport import shm_store
from mini_engine.transport.packing import checksum
from mini_engine.transport.shm_store import ShmStoreWriter
from tests.transport.store_ranks import StoreRank, eventually

MIB = 1 << 20


class Reader:
    """A rank in its own process, which takes a handle on one line and answers on another."""

    def __init__(self, path: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.store_ranks", path], cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, handle: StoreHandle) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(handle) + b"\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0


@pytest.fixture
def start_reader() -> Iterator[Callable[[str], Reader]]:
    made: list[Reader] = []

    def start(path: str) -> Reader:
        made.append(Reader(path))
        return made[-1]

    yield start
    for reader in made:
        reader.close()


def test_readers_see_whole_objects_while_others_are_written(start_reader, me, address, run, monkeypatch) -> None:
    """The writer goes on writing, freeing and growing while two processes read what lives, and what is gone."""
    monkeypatch.setattr(shm_store, "EXTENT", MIB)
    readers = [start_reader(address(rank).tensor_ipc) for rank in range(2)]
    writer = ShmStoreWriter(me, [address(0), address(1)], 8 * MIB, scrub=True)
    writer.connect(60)
    chance = random.Random(5)
    live: dict[StoreHandle, int] = {}
    refused = grown = 0
    for turn in range(150):
        tensor = torch.randint(0, 256, (chance.randrange(1, MIB),), dtype=torch.uint8)
        while (handle := writer.write(tensor)) is None:
            if turn > 20 and run(writer.grow(tensor.nbytes)):
                grown += 1
            else:
                gone = chance.choice(list(live))
                del live[gone]
                writer.free(gone.object)
                for reader in readers:
                    reader.ask(gone)
                assert ["is not in its segment" in reader.answer() for reader in readers] == [True, True]
                refused += 1
        live[handle] = checksum(tensor)
        asked = chance.choice(list(live))
        for reader in readers:
            reader.ask(asked)
        # While they sum it up, its neighbours are written and freed.
        other = writer.write(torch.zeros(chance.randrange(1, 64 << 10), dtype=torch.uint8))
        if other is not None:
            writer.free(other.object)
        assert {reader.answer() for reader in readers} == {str(live[asked])}
    assert refused > 10 and grown >= 3, (refused, grown)
    writer.close()


OWNER = """
import sys, msgspec, torch
from mini_engine.messages import RankAddress
from mini_engine.transport.codec import Encoder
from mini_engine.transport.shm_store import ShmStoreWriter

writer = ShmStoreWriter(Encoder("api 0", 7), [RankAddress(0, 0, sys.argv[1], "")], 16 << 20)
writer.connect(30)
for value in range(1, 4):
    handle = writer.write(torch.full((1 << 20,), value, dtype=torch.uint8))
    print(msgspec.json.encode(handle).decode(), flush=True)
while True:  # killed while it writes
    slot = writer.reserve(8 << 20)
    slot.fill(torch.zeros(8 << 20, dtype=torch.uint8))
    writer.free(slot.object)
"""


def test_a_killed_owner_leaves_its_objects_to_those_who_read_them(address, held) -> None:
    rank = StoreRank(address(0))
    try:
        with rank.still:
            baseline = held.descriptors()
        process = subprocess.Popen([sys.executable, "-c", OWNER, address(0).tensor_ipc], stdout=subprocess.PIPE)
        assert process.stdout is not None
        handles = [msgspec.json.decode(process.stdout.readline(), type=StoreHandle) for _ in range(3)]
        views = [rank.view(handle) for handle in handles[:2]]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert eventually(lambda: rank.connections() == 0)
        views.append(rank.view(handles[2]))
        assert [set(view.unique().tolist()) for view in views] == [{1}, {2}, {3}]
        rank.segments.clear()
        del views[:2]
        assert held.mappings() == 1 and int(views[0][-1]) == 3, "it stays with its last view"
        views.clear()
        assert held.mappings() == 0 and held.descriptors() == baseline and held.in_dev_shm() == []
    finally:
        rank.close()


def test_nothing_is_left_of_a_writer_and_its_readers(start_reader, me, address, held) -> None:
    baseline = held.descriptors()
    reader = start_reader(address(0).tensor_ipc)
    pipes = held.descriptors() - baseline
    writer = ShmStoreWriter(me, [address(0)], 4 * MIB)
    writer.connect(60)
    handle = writer.write(torch.ones(MIB, dtype=torch.uint8))
    reader.ask(handle)
    assert reader.answer() == str(checksum(torch.ones(MIB, dtype=torch.uint8)))
    writer.close()
    reader.ask(handle)
    assert reader.answer() == str(checksum(torch.ones(MIB, dtype=torch.uint8))), "its mapping outlives the writer"
    assert held.mappings() == 0 and held.descriptors() == baseline + pipes
