"""Which placement of the tensor queue an API server chooses, and where patches are made (`--mm-processor-device`)."""

import resource

import pytest
import torch

from mini_engine.config import STAGING_SLOTS, ConfigError, EngineConfig, TensorIpc
from mini_engine.engine_client.transport_probe import choose, processor_device, staging_slots
from mini_engine.messages import RankAddress
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import Encoder, TransportError
from mini_engine.transport.cuda_memory import StagingSlots
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.support.serving import metric
from tests.support.tensor_queue import HostStaging

CUDA = {"mm_processor_device": "cuda"}


def queue_to(*ranks: RankAddress) -> TensorIpcSender:
    return TensorIpcSender(Encoder("api 0", 7), ranks, Arena(16 << 20, lambda: 1 << 40))


@pytest.mark.parametrize(
    ("mode", "has_shared_memory", "chosen", "reason", "label"),
    [
        ("auto", True, "torch_shm", "the first whose probe passed", "probe_passed"),
        ("auto", False, "direct_rpc", "torch_shm failed its probe: ", "torch_shm_failed"),
        ("torch_shm", True, "torch_shm", "asked for by --mm-tensor-ipc", "asked_for"),
        ("direct_rpc", False, "direct_rpc", "asked for by --mm-tensor-ipc", "asked_for"),
    ],
)
async def test_first_placement_whose_probe_passes_is_used(
    mode: TensorIpc, has_shared_memory: bool, chosen: str, reason: str, label: str
) -> None:
    queue = queue_to()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if has_shared_memory else 1 << 20, hard))
    try:
        assert reason in await choose(3, mode, queue, seconds=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert queue.placement == chosen
    assert metric("mm_tensor_ipc_info", engine="3", transport=chosen, reason=label) == 1


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("auto", "torch_shm: .* to rank 1 .*direct_rpc: .* to rank 1 "),
        ("torch_shm", "--mm-tensor-ipc torch_shm: .*Use --mm-tensor-ipc auto"),
        ("direct_rpc", "--mm-tensor-ipc direct_rpc: .*Use --mm-tensor-ipc auto"),
    ],
)
async def test_no_placement_is_an_error(mode: TensorIpc, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await choose(3, mode, queue_to(RankAddress(3, 1, "/nowhere")), seconds=0.1)


async def test_cuda_tensors_are_copied_to_the_host_where_no_slots_can_be_made() -> None:
    def fail() -> StagingSlots:
        raise TransportError("out of memory")

    first = await choose(3, "auto", queue_to(), lambda: StagingSlots(HostStaging(), 1, 1 << 17), 1)
    assert first == "the first whose probe passed"
    replaced = await choose(3, "auto", queue := queue_to(), fail, 1)
    assert queue.placement == "torch_shm"
    assert replaced.endswith("; torch_shm with slots for CUDA tensors failed its probe: out of memory")
    with pytest.raises(ConfigError, match="--mm-tensor-ipc torch_shm: .*auto"):
        await choose(3, "torch_shm", queue_to(), fail, 1)


# --- the device of the processor -------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_start_is_refused_without_a_device() -> None:
    with pytest.raises(ConfigError, match="--mm-processor-device: torch finds no CUDA device here; choose cpu"):
        processor_device(EngineConfig(**CUDA), 0)


@pytest.mark.gpu
def test_slots_stay_within_their_memory() -> None:
    """One of 2 API servers towards one of 2 engines: a quarter of a GiB."""
    config = EngineConfig(**CUDA, api_server_count=2, data_parallel_size=2)
    free, _ = torch.cuda.mem_get_info()
    make = staging_slots(config, 0, 2)
    assert make is not None
    slots = make()
    taken = free - torch.cuda.mem_get_info()[0]
    assert slots.acquire([1] * STAGING_SLOTS) is not None and slots.acquire([1]) is None
    assert STAGING_SLOTS << 20 < taken <= (1 << 28) + (4 << 20)
