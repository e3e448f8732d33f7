"""The CUDA calls of the staging slots, as far as they can be looked at without a device; the rest needs one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mini_engine
from mini_engine.transport import cuda_memory
from mini_engine.transport.cuda_memory import CudaCopy, CudaMapped, CudaStaging, on_stream
from mini_engine.worker.serving import wait_for_device

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made current, and what is done meanwhile."""
    seen: list[str] = []

    @contextlib.contextmanager
    def noted(what: object) -> Iterator[None]:
        seen.append(f"enter {what}")
        yield
        seen.append(f"leave {what}")

    monkeypatch.setattr(torch.cuda, "device", noted)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted("stream"))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return seen


def test_the_device_is_current_before_its_stream_and_after_it(seen) -> None:
    """So that no other device's stream is made current again at the end."""
    with on_stream(SimpleNamespace(device=DEVICE)):
        seen.append("work")
    assert seen == ["enter cuda:1", "enter stream", "work", "leave stream", "leave cuda:1"]


@pytest.mark.parametrize("who", ["a step", "a copy", "a slot"])
def test_an_events_device_is_current_while_it_is_waited_for(who, seen) -> None:
    """By threads whose own device is the first one."""
    event = SimpleNamespace(device=DEVICE, synchronize=lambda: seen.append("wait"))
    if who == "a step":
        wait_for_device(SimpleNamespace(done=event))
    elif who == "a copy":
        CudaCopy(torch.empty(0), event).synchronize()
    else:
        staging = CudaStaging(DEVICE)
        staging._filled = [event]
        staging.settle(1)
    assert seen == ["enter cuda:1", "wait", "leave cuda:1"]


def test_a_copys_device_is_current_while_slots_are_let_go(seen, monkeypatch) -> None:
    mapped = object.__new__(CudaMapped)
    mapped._stream, mapped._where, mapped._memory = SimpleNamespace(device=DEVICE), torch.device("cuda", 0), None
    mapped._address, ended = 0, iter([False, True])
    mapped._last = SimpleNamespace(query=lambda: seen.append("ask") or next(ended))
    monkeypatch.setattr(cuda_memory, "_call", lambda *_: seen.append("unmap"))
    mapped.close()
    assert seen == ["enter cuda:1", "ask", "ask", "enter cuda:0", "unmap", "leave cuda:0", "leave cuda:1"]


def test_streams_are_made_current_in_no_other_way() -> None:
    package = Path(mini_engine.__file__).parent
    users = [path for path in package.rglob("*.py") if "torch.cuda.stream(" in path.read_text()]
    assert users == [package / "transport" / "cuda_memory.py"]


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices")
def test_a_thread_leaves_no_context_on_the_first_device() -> None:
    program = """
import threading, torch
from mini_engine.transport.cuda_memory import CudaStaging
from mini_engine.messages import StepResult
from mini_engine.worker.launched import Launched
from mini_engine.worker.serving import wait_for_device
from mini_engine.worker.worker import fetch_beside
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
staging, stream = CudaStaging(device), torch.cuda.Stream(device)
memory = staging.allocate(1, 1 << 20)
step = Launched(StepResult(0), None, device)

def work():
    staging.fill(1, memory[:8], torch.zeros(8, dtype=torch.uint8, device=device))
    staging.settle(1)
    fetch_beside(stream, torch.zeros(8))
    wait_for_device(step)

thread = threading.Thread(target=work)
thread.start()
thread.join()
assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
