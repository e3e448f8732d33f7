"""What a worker's process chooses before it loads a model. `tests/faults/` shows a rank that loses another."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from benchmarks.runner import CONFIGS
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.launch.plan import parallelism
from mini_engine.launch.plan.memory_plan import settle_memory
from mini_engine.launch.plan.parallelism import ENGINE_BYTES, weight_bytes
from mini_engine.messages import MediaCachePlan
from mini_engine.model.config import ModelConfig
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


def test_a_kv_cache_that_the_supervisor_has_settled_is_not_refused(monkeypatch):
    """Recurrent states are memory only once they are used: the size counts on that."""
    model = ModelConfig.from_dict(json.loads((CONFIGS / "Qwen3.5-4B.json").read_text()))
    free = weight_bytes(EngineConfig(), model)[0] + ENGINE_BYTES + (100 << 20)
    config, _ = settle_memory(EngineConfig(device="cpu"), model, MediaCachePlan("off", 0, ""), free)
    monkeypatch.setattr(worker, "available_memory", lambda: free)
    monkeypatch.setattr(worker.ModelConfig, "from_dir", lambda _: model)
    for device, is_refused in ("cpu", False), ("auto", True):  # with a GPU that torch cannot use
        monkeypatch.setattr(parallelism, "has_gpu", lambda: True)
        init = Mock(config=dataclasses.replace(config, device=device), model_dir="")
        with pytest.raises(ConfigError, match="does not fit") if is_refused else contextlib.nullcontext():
            worker.check_memory(init, CPU)


def test_attention_backends_on_the_cpu():
    assert worker.choose_backend("auto", CPU) == worker.choose_backend("sdpa", CPU) == "sdpa"
    with pytest.raises(ConfigError, match="--attention-backend triton: .*; choose auto"):
        worker.choose_backend("triton", CPU)


def test_a_worker_on_the_cpu_needs_no_triton_and_no_worker_transformers():
    code = "import sys; sys.modules['triton'] = None; import mini_engine.worker.worker; "
    code += "assert 'transformers' not in sys.modules; import benchmarks.cli"
    subprocess.run([sys.executable, "-c", code], check=True)
