"""What a worker's process chooses before it loads a model. `tests/faults/` shows a rank that loses another."""

import subprocess
import sys

import pytest
import torch

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.worker import worker

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_collectives():
    names = {("auto", CPU): "shm", ("auto", CUDA): "nccl", ("gloo", CUDA): "gloo", ("gloo", CPU): "gloo"}
    for (asked, device), name in names.items():
        assert worker.choose_collectives(EngineConfig(distributed_backend=asked), device) == name
    with pytest.raises(ConfigError, match="nccl needs CUDA devices, and there is none here; use shm or auto"):
        worker.choose_collectives(EngineConfig(distributed_backend="nccl"), CPU)
    with pytest.raises(ConfigError, match="shm is for workers on the CPU; use nccl, gloo or auto"):
        worker.choose_collectives(EngineConfig(distributed_backend="shm"), CUDA)


def test_attention_backends_on_the_cpu():
    assert worker.choose_backend("auto", CPU) == worker.choose_backend("sdpa", CPU) == "sdpa"
    with pytest.raises(ConfigError, match="--attention-backend triton: .*; choose auto"):
        worker.choose_backend("triton", CPU)


def test_a_worker_on_the_cpu_needs_no_triton_and_no_worker_transformers():
    code = "import sys; sys.modules['triton'] = None; import mini_engine.worker.worker; "
    code += "assert 'transformers' not in sys.modules; import benchmarks.cli"
    subprocess.run([sys.executable, "-c", code], check=True)
