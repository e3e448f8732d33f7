"""Where an API server makes patches of frames (`--mm-processor-device`), how those on a device leave it, and what ends
with the device.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from mini_engine.config import STAGING_SLOTS, ConfigError, EngineConfig
from mini_engine.free_memory import processor_memory
from mini_engine.transport.cuda_memory import StagingSlots

SLOT_ROOM = 64 << 10  # what a slot takes beside its message, and more
CHECK_SECONDS = 1.0


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


def staging_slots(config: EngineConfig, index: int, engines: int) -> Callable[[], StagingSlots] | None:
    """What makes the staging slots for patches on the device towards one engine; None where there are no such patches.

    They are this server's share of a quarter of `--mm-ipc-gpu-memory-gb` for the engine.

    Raises:
        ConfigError: there is no device.
    """
    device = processor_device(config, index)
    if device is None:
        return None
    import torch

    from mini_engine.transport.cuda_memory import CudaStaging

    nbytes = processor_memory(config).slots // (engines * STAGING_SLOTS) - SLOT_ROOM
    return lambda: StagingSlots(CudaStaging(torch.device(device)), STAGING_SLOTS, nbytes)


async def watch_device(device: str) -> None:
    """Runs until nothing can be done on `device` in this process any more, however often it is tried.

    An illegal access, or memory that fails, spoils what CUDA keeps for a process: all its calls fail from then on, and
    only a new process can use the device. An error that passes, such as a lack of memory, ends nothing.

    Raises:
        DeviceLost: then.
    """
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        await asyncio.get_running_loop().run_in_executor(None, _check, device)


class DeviceLost(Exception):
    """The device cannot be used by this process any more."""


def _check(device: str) -> None:
    import torch

    stream = torch.cuda.default_stream(device)
    with contextlib.suppress(RuntimeError):  # it may be of what was done before: CUDA tells such an error once
        stream.query()
        return
    try:
        stream.query()
    except RuntimeError as error:
        raise DeviceLost(f"{device} cannot be used by this process any more: {error}") from error
