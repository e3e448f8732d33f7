"""Receivers and senders in processes of their own, some of which are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest
import torch

from mini_engine.messages import (
    MessageId,
    TensorHandle,
)
from mini_engine.transport.base import Unreachable
from tests.worker.receiving import Core, eventually, rank_address, ready, send

RANK = """
import sys, zlib, zmq, msgspec
from mini_engine.messages import RankAddress, TensorHandle
from mini_engine.transport.codec import Encoder
from mini_engine.worker.media_inputs import MediaInputs

rank, core, queue, direct = int(sys.argv[1]), *sys.argv[2:]
me = Encoder(f"worker 0.{rank}", 100 + rank)
inputs = MediaInputs(RankAddress(0, rank, queue, direct), core, me, rank, zmq.Context())
inputs.start()
for line in sys.stdin:
    handle = msgspec.json.decode(line, type=TensorHandle)
    print(zlib.crc32(inputs.tensor(handle).numpy().tobytes()), flush=True)
inputs.close()
"""


def start_rank(runtime: Path, core: Core, rank: int) -> subprocess.Popen[str]:
    address = rank_address(runtime, rank)
    arguments = [str(rank), core.endpoint, address.tensor_ipc, address.direct_rpc]
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_two_rank_processes(runtime, core, connect) -> None:
    """Both transports to two ranks in processes of their own; then one is killed, and the other goes on."""
    ranks = [start_rank(runtime, core, rank) for rank in range(2)]
    try:
        addresses = [rank_address(runtime, rank) for rank in range(2)]
        queue, direct = connect("torch_shm", addresses, 60), connect("direct_rpc", addresses, 60)
        tensors = [torch.randint(0, 256, (300, 1176), dtype=torch.uint8), torch.randn(17)]
        for number, sender in enumerate([queue, direct, queue, direct], start=1):
            handles = send(sender, number, *tensors)
            assert {report.rank for report in core.reports(2)} == {0, 1}
            for process in ranks:
                for handle, tensor in zip(handles, tensors, strict=True):
                    process.stdin.write(msgspec.json.encode(handle).decode() + "\n")
                    process.stdin.flush()
                    assert int(process.stdout.readline()) == zlib.crc32(tensor.numpy().tobytes())
        ranks[1].kill()
        ranks[1].wait()
        with pytest.raises(Unreachable, match="rank 1 of engine 0 has broken"):
            send(queue, 5, *tensors)
        assert core.reports(1, seconds=0.1) == []  # nor did rank 0 get it
        ranks[0].stdin.close()
        assert ranks[0].wait(60) == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


SENDER = """
import asyncio, sys, time, torch
from mini_engine.messages import MessageId, RankAddress
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.tensor_ipc import TensorIpcSender

async def main():
    sender = TensorIpcSender(Encoder("api 0", 41), [RankAddress(0, 0, sys.argv[1], "")], ByteCredit(1 << 20))
    sender.probe(60)
    for number in range(1, 4):
        outgoing = await sender.reserve(MessageId(41, number), 400)
        outgoing(torch.full((100,), number, dtype=torch.int32))
        outgoing.send()
    time.sleep(60)

asyncio.run(main())
"""


def shared_mappings() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:mini-engine" in line}


def test_what_a_killed_sender_left_stays_until_the_core_drops_it(inputs, core, runtime) -> None:
    mapped = shared_mappings()  # what earlier tests left to the collector; it may go at any moment
    process = subprocess.Popen([sys.executable, "-c", SENDER, rank_address(runtime).tensor_ipc])
    try:
        assert core.reports(3, seconds=60) == [ready(1), ready(2), ready(3)]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert eventually(lambda: not inputs._queue._connections)
    for number in range(1, 4):
        tensor = inputs.tensor(TensorHandle(MessageId(41, number), 0, (100,), "int32"))
        assert set(tensor.tolist()) == {number}
    del tensor
    assert shared_mappings() - mapped
    inputs.drop_sender(41)
    # The receiver thread may be about to leave the frame that held the last view.
    assert eventually(lambda: not shared_mappings() - mapped)
