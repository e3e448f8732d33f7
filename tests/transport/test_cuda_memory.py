"""The CUDA calls of the staging slots: errors on a machine without a device; what needs a device is marked `gpu`."""

import subprocess
import sys

import pytest
import torch

from mini_engine.messages import DeviceSlots
from mini_engine.transport.codec import TransportError
from mini_engine.transport.cuda_memory import CudaMapped, CudaStaging, check, use_cuda

DEVICE = torch.device("cuda", 0)
SLOTS = DeviceSlots(0, 4096, bytes(64))


@pytest.mark.parametrize("start", [lambda: CudaStaging(DEVICE).allocate(1, 8), lambda: CudaMapped(DEVICE, SLOTS)])
def test_missing_cuda_bindings_is_a_transport_error(start, monkeypatch) -> None:
    """As with a CPU build of torch."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(TransportError, match="cuda.bindings is not installed: "):
        start()


@pytest.mark.gpu
def test_failed_call_leaves_torch_usable() -> None:
    """CUDA keeps a thread's last error, which torch reports after its next call."""
    with pytest.raises(TransportError, match="^cudaError"), use_cuda(DEVICE) as runtime:
        check(runtime.cudaFree(4096))
    assert torch.ones(8, device=DEVICE).sum().item() == 8


@pytest.mark.gpu
def test_staging_memory_is_a_view() -> None:
    staging = CudaStaging(DEVICE)
    before = torch.cuda.mem_get_info(DEVICE)[0]
    memory = staging.allocate(2, 1 << 28)
    assert memory.nbytes == 1 << 29
    assert torch.cuda.mem_get_info(DEVICE)[0] <= before - (1 << 29)
    content = torch.arange(1 << 20, dtype=torch.int32, device=DEVICE).view(torch.uint8)
    staging.fill(memory[1 << 28 :][: content.nbytes], content)
    assert torch.equal(memory[1 << 28 :][: content.nbytes], content)
    assert len(staging.export(1 << 28).memory) == 64


@pytest.mark.multi_gpu
def test_a_thread_leaves_no_context_on_the_first_device() -> None:
    program = """
import threading, torch
from mini_engine.transport.cuda_memory import CudaStaging
from mini_engine.messages import StepResult
from mini_engine.worker.model_runner import Launched
from mini_engine.transport.arena import ReadableMemory
from mini_engine.transport.shared_memory import create_sparse
from mini_engine.worker.pinning import PinnedMemory
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
staging, pinned = CudaStaging(device), PinnedMemory(device)
memory = staging.allocate(1, 1 << 20)
step = Launched(StepResult(0), {}, device)

def work():
    staging.fill(memory[:8], torch.zeros(8, dtype=torch.uint8, device=device))
    ReadableMemory(create_sparse(1 << 20), pinned.pin).pin_up_to(1 << 20)
    pinned.to_device(torch.zeros(8))
    step.wait()

thread = threading.Thread(target=work)
thread.start()
thread.join()
assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
