"""How this API server's tensors reach the ranks: by which placement of the tensor queue towards each engine
(`--mm-tensor-ipc`), decided by probes before it serves; and where patches are made (`--mm-processor-device`).

Knows the placements' names and their order, not how they work.
"""

import itertools
from collections.abc import Callable

import torch

from mini_engine import metrics
from mini_engine.config import STAGING_SLOTS, ConfigError, EngineConfig, TensorIpc
from mini_engine.free_memory import available_memory, processor_memory
from mini_engine.messages import TransportName
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import TransportError
from mini_engine.transport.cuda_memory import CudaStaging, StagingSlots
from mini_engine.transport.page_allocator import HIGH_WATER_STEP, PAGE_BYTES
from mini_engine.transport.tensor_ipc import TensorIpcSender

ORDER: tuple[TransportName, ...] = ("torch_shm", "direct_rpc")
SLOT_ROOM = 64 << 10  # what a slot takes beside its message, and more
PROBE_SECONDS = 60.0  # the ranks answer as soon as they run, while their model still loads


def make_arena(config: EngineConfig) -> Arena:
    """This server's memory for tensors on their way. The other API servers and the engines' stores allocate from the
    same free memory: each may be about to take a step of its mark."""
    others = (config.api_server_count - 1 + config.engines) * HIGH_WATER_STEP * PAGE_BYTES
    return Arena(config.mm_ipc_memory_bytes, lambda: available_memory() - others)


async def choose(
    engine: int,
    mode: TensorIpc,
    queue: TensorIpcSender,
    make_slots: Callable[[], StagingSlots] | None = None,
    seconds: float = PROBE_SECONDS,
) -> str:
    """Have `queue`, to the ranks of `engine`, use the first placement allowed by `mode` that passes its probe; returns
    why it is that one. Blocks while it connects.

    `make_slots` makes staging slots for CUDA tensors towards one engine; None: this server makes no such tensors. Under
    `auto`, where the probe fails with the slots, CUDA tensors are copied to the host. Raises ConfigError: the placement
    that was asked for, or every one under `auto`, fails its probe.
    """
    slots = [] if make_slots is None else [make_slots]
    without_slots = [] if mode == "torch_shm" and slots else [None]
    failures: dict[str, TransportError] = {}
    for name, make in itertools.product(ORDER if mode == "auto" else (mode,), [*slots, *without_slots]):
        try:
            await queue.probe(name, seconds, make and make())
            break
        except TransportError as error:
            failures[name if make is None else f"{name} with slots for CUDA tensors"] = error
    else:
        errors = "; ".join(f"{name}: {error}" for name, error in failures.items())
        remedy = "" if mode == "auto" else " Use --mm-tensor-ipc auto."
        problem = f"--mm-tensor-ipc {mode}: no transport reaches every worker of engine {engine}"
        raise ConfigError(f"{problem}: {errors}.{remedy}")
    reason = "asked for by --mm-tensor-ipc" if mode != "auto" else "the first whose probe passed"
    reason += "".join(f"; {failed} failed its probe: {error}" for failed, error in failures.items())
    # Without the errors' texts, which may hold addresses: more people read metrics than logs.
    label = "asked_for" if mode != "auto" else "torch_shm_failed" if "torch_shm" in failures else "probe_passed"
    metrics.mm_tensor_ipc_info.labels(str(engine), queue.placement, label).set(1)
    return reason


# --- the device of the processor --------------------------------------------------------------------------------------


def processor_device(config: EngineConfig, index: int) -> str | None:
    """The CUDA device on which API server `index` makes patches; None: it does so on the CPU. Raises ConfigError: there
    is none."""
    if config.mm_processor_device == "cpu":
        return None
    if not torch.cuda.is_available():
        raise ConfigError("--mm-processor-device: torch finds no CUDA device here; choose cpu")
    return f"cuda:{index % torch.cuda.device_count()}"


def limit_memory(config: EngineConfig, device: str) -> None:
    """Limit what torch takes of the device in this process to its share of `--mm-ipc-gpu-memory-gb`. Beyond that torch
    raises OutOfMemoryError, whatever the device has free: the KV cache was sized with this limit."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, processor_memory(config).work / total), device)


def staging_slots(config: EngineConfig, index: int, engines: int) -> Callable[[], StagingSlots] | None:
    """What makes the staging slots for patches on the device towards one engine, this server's share of a quarter of
    `--mm-ipc-gpu-memory-gb`; None where there are no such patches. Raises ConfigError: there is no device."""
    if (device := processor_device(config, index)) is None:
        return None
    nbytes = processor_memory(config).slots // (engines * STAGING_SLOTS) - SLOT_ROOM
    return lambda: StagingSlots(CudaStaging(torch.device(device)), STAGING_SLOTS, nbytes)
