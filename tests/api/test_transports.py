"""Which placement of the tensor queue an API server chooses, and where patches are made (`--mm-processor-device`)."""

from __future__ import annotations

import asyncio
import types

import pytest
import torch

from mini_engine.api.transports import (
    CHECK_SECONDS,
    DeviceLost,
    add_slots,
    choose,
    limit_memory,
    processor_device,
    staging_slots,
    watch_device,
)
from mini_engine.config import STAGING_SLOTS, ConfigError, EngineConfig, TensorIpc
from mini_engine.free_memory import CUDA_CONTEXT_BYTES, processor_bytes, processor_memory
from mini_engine.host import plan_media_cache
from mini_engine.messages import TransportChoice
from mini_engine.transport.codec import TransportError
from tests.api.patience import skip
from tests.api.peers import MemoryTransport
from tests.api.serving import metric

GIB = 1 << 30
CUDA = {"mm_processor_device": "cuda"}
FIRST = TransportChoice(3, "torch_shm", "the first")


def queue_that_fails(failing: list[str]) -> MemoryTransport:
    queue = MemoryTransport()
    queue.probe_errors = dict.fromkeys(failing, "rank 1 has no /run/socket")
    return queue


@pytest.mark.parametrize(
    ("mode", "failing", "chosen", "reason", "label"),
    [
        ("auto", [], "torch_shm", "the first whose probe passed", "probe_passed"),
        ("auto", ["torch_shm"], "direct_rpc", "torch_shm was passed over: rank 1 has no", "torch_shm_failed"),
        ("torch_shm", ["direct_rpc"], "torch_shm", "asked for by --mm-tensor-ipc", "asked_for"),
        ("direct_rpc", ["torch_shm"], "direct_rpc", "asked for by --mm-tensor-ipc", "asked_for"),
    ],
)
async def test_first_placement_whose_probe_passes_is_used(
    mode: TensorIpc, failing: list[str], chosen: str, reason: str, label: str
) -> None:
    queue = queue_that_fails(failing)
    choice = choose(3, mode, queue, timeout=1)
    assert (choice.engine, choice.transport) == (3, chosen) and queue.placement == chosen
    assert reason in choice.reason
    assert metric("mm_tensor_ipc_info", engine="3", transport=chosen, reason=label) == 1


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("auto", "torch_shm: rank 1.*direct_rpc: rank 1"),
        ("torch_shm", "--mm-tensor-ipc torch_shm: .*Use --mm-tensor-ipc auto"),
        ("direct_rpc", "--mm-tensor-ipc direct_rpc: .*Use --mm-tensor-ipc auto"),
    ],
)
async def test_no_placement_is_an_error(mode: TensorIpc, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose(3, mode, queue_that_fails(["torch_shm", "direct_rpc"]), timeout=1)


async def test_slots_whose_probe_fails_send_cuda_tensors_by_way_of_the_host() -> None:
    assert add_slots(queue_that_fails([]), FIRST, "auto", object, 1) == FIRST
    replaced = add_slots(queue_that_fails(["slots"]), FIRST, "auto", object, 1)
    assert replaced.reason == "the first; CUDA tensors go by way of the host: rank 1 has no /run/socket"
    with pytest.raises(ConfigError, match="--mm-tensor-ipc torch_shm: .*auto"):
        add_slots(queue_that_fails(["slots"]), FIRST, "torch_shm", object, 1)


async def test_slots_without_device_memory_do_so_too() -> None:
    def make() -> object:
        raise TransportError("out of memory")

    assert add_slots(queue_that_fails([]), FIRST, "auto", make, 1).reason.endswith("out of memory")
    with pytest.raises(ConfigError):
        add_slots(queue_that_fails(["torch_shm"]), FIRST, "auto", make, 1)


# --- the device of the processor -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({**CUDA, "device": "cpu"}, "not --device cpu; choose cpu"),
        ({"mm_ipc_gpu_memory_gb": 2.0}, "is for --mm-processor-device cuda; leave it out"),
        ({**CUDA, "mm_processor_cache_type": "shm"}, "choose --mm-processor-cache-type lru or auto"),
        ({**CUDA, "mm_tensor_ipc": "direct_rpc"}, "choose --mm-tensor-ipc auto"),
        (
            {**CUDA, "mm_ipc_gpu_memory_gb": 0.01, "api_server_count": 8, "data_parallel_size": 4},
            "--mm-ipc-gpu-memory-gb: 256 staging slots, 8 .* of 8 .* of 4 .*, share a quarter of it; set 1 at least$",
        ),
        ({**CUDA, "api_server_count": 64, "data_parallel_size": 3}, "--mm-ipc-gpu-memory-gb: .* set 6 at least$"),
    ],
)
def test_settings_that_do_not_go_together(given: dict, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        EngineConfig(**given).validate()
    EngineConfig(**CUDA, mm_ipc_gpu_memory_gb=1.0, api_server_count=8, data_parallel_size=4).validate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_start_is_refused_without_a_device() -> None:
    with pytest.raises(ConfigError, match="--mm-processor-device: torch finds no CUDA device here; choose cpu"):
        processor_device(EngineConfig(**CUDA), 0)


def test_memory_of_all_api_servers_is_within_the_budget() -> None:
    cpu = EngineConfig()
    assert processor_device(cpu, 0) is None and staging_slots(cpu, 0, 1) is None
    assert sum(processor_memory(cpu)) == 0 == processor_bytes(cpu, 1)
    two = EngineConfig(**CUDA, api_server_count=2)
    assert processor_memory(two) == (GIB // 2, 3 * GIB // 2)
    tight = EngineConfig(**CUDA, api_server_count=3, mm_ipc_gpu_memory_gb=0.6)
    assert 3 * sum(processor_memory(tight)) == pytest.approx(0.6 * GIB, abs=3)
    # Three servers take turns with two devices: one has two of them, each with a context of CUDA.
    assert processor_bytes(tight, 2) == 2 * (sum(processor_memory(tight)) + CUDA_CONTEXT_BYTES)
    plan = plan_media_cache(EngineConfig(**CUDA))
    assert (plan.kind, plan.reason) == ("lru", "patches made on CUDA are kept there")


def test_api_servers_take_turns_with_the_devices_and_limit_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=16 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: seen.append(given))
    assert [processor_device(EngineConfig(**CUDA), index) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    limit_memory(EngineConfig(**CUDA), "cuda:0")
    limit_memory(EngineConfig(**CUDA, mm_ipc_gpu_memory_gb=64.0), "cuda:0")
    assert seen == [(3 / 16, "cuda:0"), (1.0, "cuda:0")]


class Stream:
    """Answers each query as it is told; then all is well."""

    def __init__(self, *answers: bool):
        self.answers = list(answers)

    def query(self) -> bool:
        if self.answers and not self.answers.pop(0):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return True


async def test_a_device_that_is_lost_ends_the_server_and_an_error_that_passes_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(True, False, True, True, False, False)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    watch = asyncio.create_task(watch_device("cuda:1"))
    while not watch.done():
        await asyncio.sleep(0)
        skip(CHECK_SECONDS)
    with pytest.raises(DeviceLost, match="cuda:1 cannot be used by this process any more: CUDA error: an illegal"):
        await watch
    assert not stream.answers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_slots_stay_within_their_memory() -> None:
    """One of 2 API servers towards one of 2 engines: a quarter of a GiB."""
    config = EngineConfig(**CUDA, api_server_count=2, data_parallel_size=2)
    free, _ = torch.cuda.mem_get_info()
    make = staging_slots(config, 0, 2)
    assert make is not None
    slots = make()
    taken = free - torch.cuda.mem_get_info()[0]
    assert slots.take([1] * STAGING_SLOTS) is not None and slots.take([1]) is None
    assert STAGING_SLOTS << 20 < taken <= (1 << 28) + (4 << 20)
