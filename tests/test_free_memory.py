"""What a process may still take, on faked trees of /proc and /sys/fs/cgroup."""

import os
from pathlib import Path

import pytest
import torch

from mini_engine.config import EngineConfig
from mini_engine.free_memory import (
    CUDA_CONTEXT_BYTES,
    available_memory,
    is_x86_without_bfloat16,
    processor_bytes,
    processor_memory,
    usable_cores,
)

MIB = 1 << 20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    root = tmp_path / "proc"
    (root / "self").mkdir(parents=True)
    (root / "meminfo").write_text("MemFree: 100 kB\nMemAvailable:    4096 kB\n")
    return root


def group(directory: Path, version: int, limit: int | str, used: int, cache: int = 0) -> None:
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), 2: ("max", "current", "inactive_file")}
    limit_file, usage_file, cache_key = names[version]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"memory.{limit_file}").write_text(f"{limit}\n")
    (directory / f"memory.{usage_file}").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 7\n{cache_key} {cache}\nactive_file 99\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_on_the_way_up_counts(proc: Path, tmp_path: Path, version: int):
    groups = tmp_path / "groups"
    (proc / "self" / "cgroup").write_text("3:cpu:/a/b\n" + ("4:cpuset,memory:/a/b\n" if version == 1 else "0::/a/b\n"))
    root = groups / "memory" if version == 1 else groups
    assert available_memory(proc, groups) == 4 * MIB
    group(root / "a" / "b", version, 3 * MIB, 2 * MIB, cache=MIB)  # unused file cache counts as free
    assert available_memory(proc, groups) == 2 * MIB
    group(root / "a", version, 2 * MIB, 1 * MIB + 512)
    assert available_memory(proc, groups) == 1 * MIB - 512
    group(root / "a", version, "max" if version == 2 else 9223372036854771712, MIB)  # no limit
    assert available_memory(proc, groups) == 2 * MIB
    if version == 2:
        (root / "a" / "memory.high").write_text(f"{2 * MIB + 9}\n")
        assert available_memory(proc, groups) == MIB + 9
    group(root, version, 1000, 1005)
    assert available_memory(proc, groups) == 0


def test_a_kernel_without_control_groups_limits_nothing(proc: Path, tmp_path: Path):
    assert available_memory(proc, tmp_path / "groups") == 4 * MIB
    assert usable_cores(proc, tmp_path / "groups") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("path", ["/docker/0123", "/../other"])
def test_in_a_container_the_root_is_its_own_group(proc: Path, tmp_path: Path, path: str):
    """The path in /proc is the host's, or leads out of the namespace; the directory begins at the container."""
    (proc / "self" / "cgroup").write_text(f"0::{path}\n")
    group(tmp_path / "groups", 2, MIB, 0)
    group(tmp_path / "other", 2, 1, 0)
    assert available_memory(proc, tmp_path / "groups") == MIB


def test_a_name_with_two_dots_is_not_the_group_above(proc: Path, tmp_path: Path):
    (proc / "self" / "cgroup").write_text("0::/a..b\n")
    group(tmp_path / "groups" / "a..b", 2, MIB, 0)
    assert available_memory(proc, tmp_path / "groups") == MIB


@pytest.mark.parametrize("version", [1, 2])
def test_cores_within_the_tightest_quota(proc: Path, tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    (proc / "self" / "cgroup").write_text("3:cpu,cpuacct:/a/b\n" if version == 1 else "0::/a/b\n")
    root = tmp_path / "cpu" if version == 1 else tmp_path
    assert usable_cores(proc, tmp_path) == 6
    inner, none = root / "a" / "b", "-1" if version == 1 else "max"
    groups = (inner, none, 6), (inner, "450000", 4), (root / "a", "250000", 2), (root, "5000", 1)
    for directory, quota, cores in groups:
        directory.mkdir(parents=True, exist_ok=True)
        if version == 1:
            (directory / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (directory / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (directory / "cpu.max").write_text(f"{quota} 100000\n")
        assert usable_cores(proc, tmp_path) == cores


def test_what_the_cpu_lacks_is_what_torch_says():
    lacks = torch.cpu._is_avx2_supported() and not torch.cpu._is_avx512_bf16_supported()
    assert is_x86_without_bfloat16() == lacks


def test_cuda_memory_of_all_api_servers_is_within_the_budget():
    cpu = EngineConfig()
    assert sum(processor_memory(cpu)) == 0 == processor_bytes(cpu, 1)
    two = EngineConfig(mm_processor_device="cuda", api_server_count=2)
    assert processor_memory(two) == (512 * MIB, 1536 * MIB)
    tight = EngineConfig(mm_processor_device="cuda", api_server_count=3, mm_ipc_gpu_memory_gb=0.6)
    assert 3 * sum(processor_memory(tight)) == pytest.approx(0.6 * 1024 * MIB, abs=3)
    # Three servers take turns with two devices: one has two of them, each with a context of CUDA.
    assert processor_bytes(tight, 2) == 2 * (sum(processor_memory(tight)) + CUDA_CONTEXT_BYTES)
