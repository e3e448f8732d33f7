"""How much memory this process may still take, and how many cores, and of which kind: the machine's, within the limits
of its control groups. And the memory of CUDA devices that is set aside for API servers, which they and the workers must
agree on.

Anonymous shared memory is bounded by nothing else: an allocation beyond the machine's memory does not fail, it ends in
the kernel's OOM killer. So the parts that take much ask here first. Nothing is reserved by asking.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mini_engine.config import IPC_GPU_GIB, SLOTS_PART, EngineConfig

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
RESERVE = 512 << 20  # bytes that a cache leaves free for everything else
CUDA_CONTEXT_BYTES = 1 << 30  # that CUDA and its libraries keep of a device for each process that uses it, at most
# By version of control groups: files of the limits and of the use, and the key of the file cache in `memory.stat`.
# Above `memory.high` the kernel kills no process; it takes pages back and delays each allocation.
CGROUP_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that can be had without swapping and without the OOM killer; 0 at least.

    The kernel's own estimate, MemAvailable, bounded by the limits of every control group around this process that can
    be seen from here. A group's file cache that was not used lately counts as free: the kernel drops it first.
    """
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    free = next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
    for version, directory in control_groups("memory", proc, cgroups):
        limits, usage, cache = CGROUP_FILES[version]
        for limit in limits:
            with contextlib.suppress(OSError, ValueError):  # not there, not ours to read, or it is "max"
                maximum, used = (int((directory / name).read_text()) for name in (limit, usage))
                statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
                free = min(free, maximum - used + int(statistics.get(cache, 0)))
    return max(free, 0)


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Cores that this process may keep busy: those of its affinity, within the CPU quota of every control group around
    it that can be seen from here; 1 at least."""
    cores = len(os.sched_getaffinity(0))
    for version, directory in control_groups("cpu", proc, cgroups):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        with contextlib.suppress(OSError, ValueError):  # as above
            quota, period = map(int, " ".join((directory / name).read_text() for name in names).split())
            cores = min(cores, quota // period) if quota > 0 else cores  # -1: no quota
    return max(cores, 1)


@functools.cache
def is_x86_without_bfloat16() -> bool:
    """Whether the cores have AVX2, maybe AVX-512, and no products of bfloat16."""
    lines = (PROC / "cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "avx2" in flags and "avx512_bf16" not in flags


def control_groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """Version and directory of each control group around this process that a controller may limit, the innermost first.

    In a container the path in /proc may be the host's while the directory shows the container's own group at its root,
    so files on the way up may be missing.
    """
    groups = proc / "self" / "cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():  # a kernel may be built without them
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        group = root / ("" if ".." in path.split("/") else path.strip("/"))  # "..": outside of this process's namespace
        for directory in (group, *group.parents):
            yield 1 if controllers else 2, directory
            if directory == root:
                break


class ProcessorMemory(NamedTuple):
    """Bytes of its CUDA device that one API server takes where patches are made on one: `--mm-ipc-gpu-memory-gb`
    is the sum of both over all API servers."""

    slots: int  # patches in transfer, of all engines together
    work: int  # torch's: frames, intermediate tensors of the processor, patches that wait for a slot


def processor_memory(config: EngineConfig) -> ProcessorMemory:
    """Of each API server; nothing where no patches are made on a device.

    A processor needs several times the bytes of what it makes, for each item that is processed at the time.
    """
    if config.mm_processor_device == "cpu":
        return ProcessorMemory(0, 0)
    each = int((config.mm_ipc_gpu_memory_gb or IPC_GPU_GIB) * (1 << 30)) // config.api_server_count
    return ProcessorMemory(each // SLOTS_PART, each - each // SLOTS_PART)


def processor_bytes(config: EngineConfig, devices: int) -> int:
    """Bytes that the API servers, in turns with `devices` CUDA devices, take of the one with the most of them."""
    if config.mm_processor_device == "cpu":
        return 0
    return -(-config.api_server_count // devices) * (sum(processor_memory(config)) + CUDA_CONTEXT_BYTES)


def return_freed_memory() -> None:
    """Have malloc return to the kernel what lies free between blocks in use. Without effect where the C library has no
    such call (musl)."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
