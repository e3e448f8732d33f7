"""`--mm-processor-device` and its memory: what is refused, and by whom."""

from __future__ import annotations

import types

import pytest
import torch

from mini_engine.api.transports import limit_memory, processor_device, staging_slots
from mini_engine.config import STAGING_SLOTS, ConfigError, EngineConfig
from mini_engine.free_memory import CUDA_CONTEXT_BYTES, processor_bytes, processor_memory
from mini_engine.host import plan_media_cache

GIB = 1 << 30
CUDA = {"mm_processor_device": "cuda"}
no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


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
def test_settings_that_do_not_go_together(given, remedy):
    with pytest.raises(ConfigError, match=remedy):
        EngineConfig(**given).validate()
    EngineConfig(**CUDA, mm_ipc_gpu_memory_gb=2.0).validate()
    EngineConfig(**CUDA, mm_ipc_gpu_memory_gb=1.0, api_server_count=8, data_parallel_size=4).validate()


@no_device
def test_no_device_is_no_way_to_start():
    with pytest.raises(ConfigError, match="--mm-processor-device: torch finds no CUDA device here; choose cpu"):
        processor_device(EngineConfig(**CUDA), 0)


def test_on_the_cpu_there_is_nothing_to_set_up():
    config = EngineConfig()
    assert processor_device(config, 0) is None and staging_slots(config, 0, 1) is None
    assert sum(processor_memory(config)) == 0 == processor_bytes(config, 1)


def test_the_budget_is_all_that_api_servers_allocate():
    two = EngineConfig(**CUDA, api_server_count=2)
    assert processor_memory(two) == (GIB // 2, 3 * GIB // 2)
    tight = EngineConfig(**CUDA, api_server_count=3, mm_ipc_gpu_memory_gb=0.6)
    assert 3 * sum(processor_memory(tight)) == pytest.approx(0.6 * GIB, abs=3)
    # Three servers take turns with two devices: one has two of them, each with a context of CUDA.
    assert processor_bytes(tight, 2) == 2 * (sum(processor_memory(tight)) + CUDA_CONTEXT_BYTES)


def test_torch_is_held_to_its_share(monkeypatch):
    seen: list[tuple[float, str]] = []
    device = types.SimpleNamespace(total_memory=16 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: seen.append(given))
    limit_memory(EngineConfig(**CUDA), "cuda:0")
    limit_memory(EngineConfig(**CUDA, mm_ipc_gpu_memory_gb=64.0), "cuda:0")
    assert seen == [(3 / 16, "cuda:0"), (1.0, "cuda:0")]


def test_api_servers_take_turns_with_the_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [processor_device(EngineConfig(**CUDA), index) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_patches_on_a_device_are_kept_there():
    plan = plan_media_cache(EngineConfig(**CUDA))
    assert (plan.kind, plan.reason) == ("lru", "patches made on CUDA are kept there")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_slots_stay_within_their_memory():
    """One of 2 API servers towards one of 2 engines: a quarter of a GiB."""
    config = EngineConfig(**CUDA, api_server_count=2, data_parallel_size=2)
    free, _ = torch.cuda.mem_get_info()
    make = staging_slots(config, 0, 2)
    assert make is not None
    slots = make()
    taken = free - torch.cuda.mem_get_info()[0]
    assert slots.take([1] * STAGING_SLOTS) is not None and slots.take([1]) is None
    assert STAGING_SLOTS << 20 < taken <= (1 << 28) + (4 << 20)
