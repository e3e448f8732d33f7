"""The tensor queue when a process is killed with SIGKILL."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from mini_engine.transport.base import TransportError, Unreachable
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.packing import Received
from mini_engine.transport.tensor_ipc import TensorIpcReceiver, TensorIpcSender

MIB = 1 << 20


@pytest.fixture
def victim(address) -> Iterator[TensorIpcReceiver]:
    receiver = TensorIpcReceiver(Encoder("worker 0.0", 100), address(0))
    yield receiver
    receiver.close()


SENDER = """
import asyncio, os, signal, sys, time, torch
from mini_engine.messages import MessageId, RankAddress
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.tensor_ipc import TensorIpcSender

torch.set_num_threads(1)  # so that a fork of this process is whole

def send(incarnation):
    sender = TensorIpcSender(Encoder("api", incarnation), [RankAddress(0, 0, sys.argv[1], "")], ByteCredit(1 << 20))
    sender.probe(60)
    async def forever():
        number = 0
        while True:
            number += 1
            outgoing = await sender.reserve(MessageId(incarnation, number), 4000)
            outgoing(torch.full((1000,), number, dtype=torch.int32))
            outgoing(torch.full((3,), incarnation, dtype=torch.int64))
            try:
                outgoing.send()
            except Exception:
                time.sleep(0.001)  # the rank is slower
            if number % 4 == 0:
                sender.consumed([MessageId(incarnation, number)])
                time.sleep(0.0005)
    asyncio.run(forever())

for incarnation, delay in enumerate(map(float, sys.argv[2:]), start=1):
    child = os.fork()
    if child == 0:
        send(incarnation)
    sys.stdin.readline() if delay < 0 else time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_senders_killed_at_random_moments(victim, address, drain, held) -> None:
    """What arrived is whole, what did not leaves nothing behind, and the next sender is served."""
    baseline = held.descriptors()
    delays = [f"{random.uniform(0.005, 0.08):.4f}" for _ in range(12)] + ["-1"]  # the last one when it was heard
    process = subprocess.Popen([sys.executable, "-c", SENDER, address(0).tensor_ipc, *delays], stdin=subprocess.PIPE)
    assert process.stdin is not None
    seen: dict[int, list[int]] = {}
    kept: list[Received] = []
    while process.poll() is None:
        for arrival in drain(victim, 0.02):
            assert isinstance(arrival, Received), arrival
            numbers, who = arrival.tensors
            incarnation, number = arrival.message.incarnation, arrival.message.number
            seen.setdefault(incarnation, []).append(number)
            assert set(who.tolist()) == {incarnation}
            if number % 4:  # not consumed: its bytes are ours for good
                assert set(numbers.tolist()) == {number}
                kept.append(arrival)
        if len(delays) in seen and not process.stdin.closed:
            process.stdin.close()
    assert process.returncode == 0
    drain(victim, 0.1)
    assert len(victim._connections) == 0
    assert all(numbers == sorted(set(numbers)) for numbers in seen.values())
    for arrival in kept:
        assert set(arrival.tensors[0].tolist()) == {arrival.message.number}
    assert held.descriptors() <= baseline + held.mappings()  # before Python 3.13 a mapping keeps a descriptor
    del arrival, kept, numbers, who
    assert held.descriptors() == baseline and held.mappings() == 0


def test_a_killed_receiver_frees_everything_and_is_noticed(me, address, message, run, held) -> None:
    script = (
        "import sys, time\n"
        "from mini_engine.messages import RankAddress\n"
        "from mini_engine.transport.codec import Encoder\n"
        "from mini_engine.transport.tensor_ipc import TensorIpcReceiver\n"
        "r = TensorIpcReceiver(Encoder('worker', 5), RankAddress(0, 0, sys.argv[1], ''))\n"
        "while True:\n"
        "    for fd in r.descriptors(): list(r.receive(fd))\n"
        "    time.sleep(0.001)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, address(0).tensor_ipc])
    sender = TensorIpcSender(me, [address(0)], ByteCredit(MIB))
    try:
        sender.probe(60)
        outgoing = run(sender.reserve(message(1), 100))
        outgoing(torch.ones(100, dtype=torch.uint8))
        assert outgoing.send() == 1
        outgoing = run(sender.reserve(message(2), 100))
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(TransportError, match="gone"):
            outgoing.send()
        with pytest.raises(Unreachable, match="refused"):
            run(sender.reserve(message(3), 100))
    finally:
        process.kill()
        process.wait()
        sender.close()
    del outgoing
    assert held.mappings() == 0 and held.in_dev_shm() == []
