"""Why the tensor queue is no `torch.multiprocessing.Queue`: the hangs and losses of a plain one, each shown here, and
the same scenes with `TensorIpcSender` and `TensorIpcReceiver`, which go on.

The plain queue runs in processes of its own, forked by a script, so that its threads and locks end with the script.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.packing import Received
from mini_engine.transport.tensor_ipc import TensorIpcReceiver, TensorIpcSender

PRELUDE = """
import json, os, queue, signal, sys, threading, time
import torch
torch.set_num_threads(1)  # so that a fork of this process is whole
context = torch.multiprocessing.get_context("fork")
plain, alive, pids = context.Queue(), context.Event(), [os.getpid()]
LONG = 1.0  # seconds for what takes none where it works

def start(target, *args):
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    pids.append(process.pid)
    return process

def kill(process):
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL

def wait_until_held(lock):
    deadline = time.monotonic() + 60
    while lock.acquire(block=False):
        lock.release()
        assert time.monotonic() < deadline
        time.sleep(0.005)

def can_take(lock, seconds=LONG):
    taken = lock.acquire(timeout=seconds)
    if taken:
        lock.release()
    return taken

told = context.Event()  # that a value cannot be pickled
say = plain._on_queue_feeder_error

def tell(error, value):
    say(error, value)
    told.set()

plain._on_queue_feeder_error = tell

def put(value):
    plain.put(value)
    alive.set()
    time.sleep(60)  # as an API server lives on; a queue's tensors need their sender

def get(seconds=LONG):
    try:
        return plain.get(timeout=seconds) is not None
    except queue.Empty:
        return False

def report(**found):
    print(json.dumps({"pids": pids, **found}), flush=True)
    for child in pids[1:]:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os._exit(0)  # without the queue's own farewell, which would wait for its threads
"""


@pytest.fixture
def plain(runtime: Path) -> Callable[[str], dict[str, Any]]:
    """Run a scene with a plain queue in a script of its own; returns what it reported."""

    def play(scene: str) -> dict[str, Any]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + scene], env={**os.environ, "TMPDIR": str(runtime)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            stdout, stderr = process.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.returncode == 0, stderr
        found = json.loads(stdout)
        names = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in found["pids"])]
        assert names == []
        return {**found, "stderr": stderr}

    return play


def test_the_scenes_work_without_a_kill(plain) -> None:
    found = plain(
        "start(put, torch.ones(3)); assert alive.wait(60); report(got=get(60), lock=can_take(plain._wlock, 60))"
    )
    assert found["got"] and found["lock"]


def test_a_producer_killed_in_its_write_silences_the_others(plain) -> None:
    """It holds the write lock, which nobody gives back, and has left half a message, whose rest a reader awaits."""
    found = plain("""
victim = start(put, (torch.ones(3), bytes(1 << 20)))  # more than a pipe holds: its thread stays in the write
assert alive.wait(60)  # and has let go of what the event is made of
wait_until_held(plain._wlock)
kill(victim)
alive.clear()
start(put, torch.ones(3))
survivor_believes_it_sent = alive.wait(60)
lock = can_take(plain._wlock)
reader = threading.Thread(target=plain.get, kwargs={"timeout": LONG}, daemon=True)
reader.start()
reader.join(2 * LONG)
report(believed=survivor_believes_it_sent, lock=lock, reader_hangs=reader.is_alive())
""")
    assert found["believed"], "put returns all the same"
    assert not found["lock"], "no other producer writes any more"
    assert found["reader_hangs"], "get does not even keep its time-out"


def test_a_reader_killed_while_it_waits_silences_its_successor(plain) -> None:
    found = plain("""
victim = start(plain.get)
wait_until_held(plain._rlock)
kill(victim)
start(put, torch.ones(3))
assert alive.wait(60)
report(got=get())
""")
    assert not found["got"]


def test_put_returns_before_it_pickles(plain) -> None:
    found = plain("""
weight = torch.ones(3, requires_grad=True)
start(put, weight * 2)  # cannot be pickled
believed = alive.wait(60)
assert told.wait(60)
report(believed=believed, got=get())
""")
    assert found["believed"] and not found["got"]
    assert "requires_grad" in found["stderr"], "the error is a text on the producer's stderr, and nowhere else"


# --- the same scenes with the tensor queue ---------------------------------------------------------------------------

SENDER = """
import asyncio, os, signal, sys, torch
from mini_engine.messages import MessageId, RankAddress
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.frames import HEADER
from mini_engine.transport.tensor_ipc import TensorIpcSender

torch.set_num_threads(1)  # so that a fork of this process is whole

def send(incarnation):
    sender = TensorIpcSender(Encoder("api", incarnation), [RankAddress(0, 0, sys.argv[1], "")], ByteCredit(1 << 20))
    sender.probe(60)
    outgoing = asyncio.run(sender.reserve(MessageId(incarnation, 1), 4000))
    outgoing(torch.full((1000,), incarnation, dtype=torch.int32))
    outgoing.send()
    return sender

child = os.fork()
if child == 0:
    connection = send(1)._links[0][1]._socket
    connection.send(HEADER.pack(1000, 0) + b"the rest never comes")
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitpid(child, 0)[1] == signal.SIGKILL
send(2)
"""


def test_a_sender_killed_in_its_write_silences_nobody(address, drain, held) -> None:
    baseline = held.descriptors()
    receiver = TensorIpcReceiver(Encoder("worker 0.0", 100), address(0))
    process = subprocess.Popen([sys.executable, "-c", SENDER, address(0).tensor_ipc])
    try:
        arrivals = drain(receiver, 60, count=2)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert all(isinstance(arrival, Received) for arrival in arrivals)
    assert [arrival.message.incarnation for arrival in arrivals] == [1, 2]
    for arrival in arrivals:
        assert set(arrival.tensors[0].tolist()) == {arrival.message.incarnation}  # the dead one's too
    receiver.close()
    del arrival, arrivals
    assert held.descriptors() == baseline and held.mappings() == 0 and held.in_dev_shm() == []


def test_what_cannot_be_sent_is_known_at_once(me, address, message, run) -> None:
    sender = TensorIpcSender(me, [address(0)], ByteCredit(1 << 20))
    outgoing = run(sender.reserve(message(1), 1000))
    with pytest.raises(TransportError, match="only dense CPU tensors"):
        outgoing(torch.ones(3, device="meta"))
    outgoing(torch.ones(3, requires_grad=True) * 2)  # the plain queue's refusal: the values travel
    with pytest.raises(TransportError, match="not connected"):
        outgoing.send()  # a rank that is gone: see test_tensor_ipc_kills.py
    sender.close()
