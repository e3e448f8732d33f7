"""What `--attention-backend` means on a device, and what is said where it cannot be."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mini_engine.config import ConfigError
from mini_engine.kernels import ops
from mini_engine.kernels.ops import triton_obstacle
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker.attention import choose_backend, leave_out_cudnn, make_backend, varlen_obstacle
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.paged_attention import SdpaBackend
from mini_engine.worker.varlen_attention import VarlenBackend
from tests.e2e.running_server import ROOT

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def forget_devices() -> Iterator[None]:
    triton_obstacle.cache_clear()
    yield
    triton_obstacle.cache_clear()


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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="needs a C compiler .* install gcc and libc6-dev, or name one in CC"):
        choose_backend(wanted, CUDA)
    assert choose_backend("auto", CPU) == "sdpa"
    monkeypatch.setenv("CC", "/opt/cc")
    has_headers(monkeypatch, tmp_path)
    assert choose_backend("sdpa", CUDA) == "sdpa"


@pytest.mark.parametrize("scheme", ["venv", "posix_local"])
def test_cuda_without_pythons_headers_is_refused(scheme, monkeypatch, tmp_path):
    """Where Triton looks for them: not in the directory that is Debian's for what its packages do not bring."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("CC", "/opt/cc")
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sysconfig.get_default_scheme", lambda: scheme)
    has_headers(monkeypatch, tmp_path, "posix_prefix" if scheme == "posix_local" else scheme)
    assert choose_backend("auto", CUDA) == "triton"
    (tmp_path / "Python.h").unlink()
    said = f"needs .* Python's headers .* there is no {tmp_path}/Python.h: install python3-dev, or name its directory "
    with pytest.raises(ConfigError, match=said):
        choose_backend("auto", CUDA)
    assert choose_backend("auto", CPU) == "sdpa"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"/nowhere:{elsewhere}")
    assert choose_backend("auto", CUDA) == "triton"


def has_headers(monkeypatch: pytest.MonkeyPatch, path: Path, scheme: str | None = None) -> None:
    """There is a Python.h in `path`, which is where headers are by `scheme`, or by any."""
    (path / "Python.h").touch()

    def place(name: str, asked: str) -> str:
        return str(path) if scheme in (None, asked) else "/nowhere"

    monkeypatch.setattr("sysconfig.get_path", place)


def test_varlen_of_a_torch_that_takes_no_block_table(monkeypatch):
    def older(query: object, key: object, value: object, cu_seq_q: object, *, seqused_k: object) -> None: ...

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    assert "takes no block_table, enable_gqa; it does from 2.12 on" in (varlen_obstacle(CUDA) or "")


def test_varlen_of_this_torch(monkeypatch):
    """Its arguments are those that are passed, whatever it computes."""
    from torch.nn.attention.varlen import varlen_attn

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    newer = {"block_table", "seqused_k", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)
    assert (varlen_obstacle(CUDA) is None) == newer


@pytest.mark.parametrize(
    ("size", "dtype", "dim", "why"),
    [
        (16, torch.bfloat16, 128, "multiple of 256 tokens, not of 16; set --block-size 256, or choose auto"),
        (384, torch.float16, 128, "multiple of 256 tokens, not of 384; set --block-size 256, or choose auto"),
        (256, torch.float32, 128, "bfloat16 and float16, not in float32; set --dtype bfloat16, or choose auto"),
        (256, torch.bfloat16, 20, "multiple of 8 up to 256, not of 20; serve another model, or choose auto"),
    ],
)
def test_a_cache_that_varlen_cannot_read(size, dtype, dim, why):
    cache = KVCache.allocate(AttentionShape(1, 2, dim), 1, size, dtype, CPU)
    with pytest.raises(ConfigError, match=f"^--attention-backend varlen: FlashAttention .*{why}$"):
        make_backend("varlen", cache, 100)
    assert isinstance(make_backend("sdpa", cache, 100), SdpaBackend)


def test_a_cache_that_varlen_can_read():
    cache = KVCache.allocate(AttentionShape(1, 2, 80), 1, 512, torch.bfloat16, CPU)
    assert isinstance(make_backend("varlen", cache, 100), VarlenBackend)


@pytest.mark.parametrize("lack", ["triton", "capability"])
def test_the_small_operators_go_where_attention_goes(lack, monkeypatch):
    """A device that Triton cannot serve: neither may want a kernel."""
    if lack == "triton":
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setenv("PATH", "/nowhere")  # nor need there be a compiler for any
    monkeypatch.delenv("CC", raising=False)
    assert choose_backend("auto", CUDA) == "sdpa"
    assert not ops.fused(types.SimpleNamespace(is_cuda=True, device=CUDA))


def test_cudnn_is_left_out():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        leave_out_cudnn()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_worker_on_the_cpu_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import mini_engine.worker.worker"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    loaded = "import sys, mini_engine.worker.worker; sys.exit('triton.language' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=ROOT).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_takes_the_kernels():
    assert choose_backend("auto", CUDA) == choose_backend("triton", CUDA) == "triton"
