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
from mini_engine.transport.cuda_memory import on_stream


def test_the_device_is_current_before_its_stream_and_after_it(monkeypatch) -> None:
    """So that no other device's stream is made current again at the end."""
    seen: list[str] = []

    @contextlib.contextmanager
    def noted(what: object) -> Iterator[None]:
        seen.append(f"enter {what}")
        yield
        seen.append(f"leave {what}")

    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device", noted)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted("stream"))
    with on_stream(SimpleNamespace(device=device)):
        seen.append("work")
    assert seen == ["enter cuda:1", "enter stream", "work", "leave stream", "leave cuda:1"]


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
from mini_engine.worker.worker import fetch_beside
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
staging, stream = CudaStaging(device), torch.cuda.Stream(device)
memory = staging.allocate(1, 1 << 20)

def work():
    staging.fill(1, memory[:8], torch.zeros(8, dtype=torch.uint8, device=device))
    staging.settle(1)
    fetch_beside(stream, torch.zeros(8))

thread = threading.Thread(target=work)
thread.start()
thread.join()
assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
