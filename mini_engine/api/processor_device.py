"""Where an API server makes patches of frames (`--mm-processor-device`), and how those on a device leave it."""

from __future__ import annotations

from collections.abc import Callable

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.free_memory import processor_memory
from mini_engine.messages import RankAddress
from mini_engine.transport.base import TensorSender
from mini_engine.transport.codec import Encoder

SLOTS = 8  # messages on their way to an engine at once
SLOT_ROOM = 64 << 10  # what a slot takes beside its message, and more


def processor_device(config: EngineConfig, index: int) -> str | None:
    """The CUDA device on which API server `index` makes patches; None: it does so on the CPU.

    Raises:
        ConfigError: there is none.
    """
    if config.mm_processor_device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--mm-processor-device: torch finds no CUDA device here; choose cpu")
    return f"cuda:{index % torch.cuda.device_count()}"


def limit_memory(config: EngineConfig, device: str) -> None:
    """Hold what torch takes of the device in this process to its share of `--mm-ipc-gpu-memory-gb`.

    Beyond that torch raises OutOfMemoryError, whatever the device has free: the KV cache was sized with this limit.
    """
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, processor_memory(config).work / total), device)


def cuda_sender(
    config: EngineConfig, encoder: Encoder, index: int, engines: int
) -> Callable[[list[RankAddress]], TensorSender] | None:
    """What makes the sender of patches on the device towards one engine's ranks; None where there are no such patches.

    Its slots are this server's share of a quarter of `--mm-ipc-gpu-memory-gb` for the engine.

    Raises:
        ConfigError: there is no device, or no room for a byte in each slot.
    """
    device = processor_device(config, index)
    if device is None:
        return None
    import torch

    from mini_engine.transport.cuda_memory import CudaStaging
    from mini_engine.transport.cuda_slots import CudaSender

    nbytes = processor_memory(config).slots // (engines * SLOTS) - SLOT_ROOM
    if nbytes < 1:
        least = 4 * config.api_server_count * engines * SLOTS * SLOT_ROOM / (1 << 30)
        raise ConfigError(
            f"--mm-ipc-gpu-memory-gb: a quarter of it is too little for {SLOTS} slots of each of "
            f"{config.api_server_count} API server(s) for each of {engines} engine(s); take {2 * least:.2g} or more"
        )

    def make(ranks: list[RankAddress]) -> TensorSender:
        return CudaSender(encoder, ranks, CudaStaging(torch.device(device)), SLOTS, nbytes)

    return make
