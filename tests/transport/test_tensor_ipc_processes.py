"""Senders that are killed, in processes of their own: nothing is held of them, and the next one is served."""

import array
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.messages import TensorMessage
from mini_engine.transport import shared_memory as memory
from mini_engine.transport.arena import WritableMemory
from mini_engine.transport.codec import Encoder
from mini_engine.transport.pages import PAGE_BYTES
from mini_engine.transport.stream_frames import pack_frame
from mini_engine.transport.tensor_ipc import Failed, Received, TensorIpcReceiver
from tests.support.tensor_queue import ME, PATIENCE, Held, address_of, pump

FORKS = multiprocessing.get_context("forkserver")  # a fork of this process would have its locks, but not its threads
FORKS.set_forkserver_preload(["mini_engine.transport.tensor_ipc"])


def start(target: Any, *args: Any) -> Any:
    process = FORKS.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def kill(process: Any) -> None:
    process.kill()
    process.join()
    process.close()


@pytest.fixture(autouse=True, scope="module")
def forkserver() -> None:
    """It stays, and with it some descriptors."""
    kill(start(time.sleep, PATIENCE))


def write_and_die(path: str, written: bytes, fd: int) -> None:
    """A forked process writes this, the descriptor with its first byte, and is killed."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(path)
    if written:
        peer.sendmsg([written], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.kill(os.getpid(), signal.SIGKILL)


def write_each_beginning(path: str, frames: bytes, memory_path: str, turns: Connection) -> None:
    """In a process that is smaller than pytest's, and so is forked faster: one more byte in each turn."""
    fd = os.open(memory_path, os.O_RDWR)
    for cut in range(len(frames) + 1):
        turns.recv()
        write_and_die(path, frames[:cut], fd)
        turns.send(None)


def test_a_sender_killed_at_each_byte_leaves_the_whole_frames_and_nothing_else(runtime: Path, held: Held) -> None:
    address = address_of(runtime)
    fd = memory.create_sparse(4 * PAGE_BYTES)
    WritableMemory(fd).write([(2, 1)], torch.arange(8, dtype=torch.uint8))
    first = pack_frame(ME.encode(TensorMessage(1, (8,), extents=[(2, 1)])), descriptors=1)
    second = pack_frame(ME.encode(TensorMessage(2, (5,))), 5) + b"\1\2\3\4\5"
    receiver = TensorIpcReceiver(Encoder("worker 0.0", 100), address)
    frames, (turns, ends) = first + second, FORKS.Pipe()
    writing = start(write_each_beginning, address.tensor_ipc, frames, f"/proc/{os.getpid()}/fd/{fd}", ends)
    for cut in range(len(frames) + 1):
        arrivals: list[Received | Failed] = []
        turns.send(None)
        assert turns.poll(PATIENCE)
        turns.recv()
        pump(receiver, arrivals.append, PATIENCE)  # accepts it
        while len(receiver.descriptors()) > 1:  # its end is there to be read
            pump(receiver, arrivals.append, PATIENCE)
        numbers = [arrival.message.number for arrival in arrivals]
        assert numbers == ([1, 2] if cut == len(frames) else [1] if cut >= len(first) else []), cut
        assert all(isinstance(arrival, Received) for arrival in arrivals)
        if numbers:
            assert arrivals[0].rows(0, 8).tolist() == list(range(8))
        del arrivals
    kill(writing)
    turns.close()
    ends.close()
    receiver.close_streams()
    os.close(fd)
    assert held.is_baseline()
