"""What `--attention-backend` means on a device, and what is said where it cannot be."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from mini_engine.config import ConfigError
from mini_engine.worker.attention import choose_backend, varlen_obstacle
from tests.e2e.running_server import ROOT

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("wanted", ["auto", "sdpa"])
def test_the_cpu_takes_torchs_own(wanted):
    assert choose_backend(wanted, CPU) == "sdpa"


@pytest.mark.parametrize("wanted", ["triton", "varlen"])
def test_what_needs_cuda_is_refused_on_the_cpu(wanted):
    with pytest.raises(ConfigError, match=f"--attention-backend {wanted}: .*need.* CUDA.* runs on cpu; choose auto"):
        choose_backend(wanted, CPU)


@pytest.mark.parametrize("wanted", ["auto", "sdpa", "triton"])
def test_cuda_without_a_c_compiler_is_refused(wanted, monkeypatch, tmp_path):
    """With each backend, since the small operators are Triton's kernels on CUDA."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="needs a C compiler .* install gcc and libc6-dev, or name one in CC"):
        choose_backend(wanted, CUDA)
    assert choose_backend("auto", CPU) == "sdpa"
    monkeypatch.setenv("CC", "/opt/cc")
    assert choose_backend("sdpa", CUDA) == "sdpa"


def test_varlen_of_a_torch_that_takes_no_block_table(monkeypatch):
    def older(query: object, key: object, value: object, cu_seq_q: object, *, seqused_k: object) -> None: ...

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    assert "takes no block_table, enable_gqa; it does from 2.12 on" in (varlen_obstacle(CUDA) or "")


def test_varlen_of_this_torch():
    """Its arguments are those that are passed, whatever it computes."""
    from torch.nn.attention.varlen import varlen_attn

    newer = {"block_table", "seqused_k", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)
    assert (varlen_obstacle(CUDA) is None) == newer


def test_a_worker_on_the_cpu_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import mini_engine.worker.worker, mini_engine.bench.cli"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    loaded = "import sys, mini_engine.worker.worker; sys.exit('triton.language' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=ROOT).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_takes_the_kernels():
    assert choose_backend("auto", CUDA) == choose_backend("triton", CUDA) == "triton"
