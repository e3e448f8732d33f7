"""Which attention a worker computes with: what a backend offers, and the choice of one.

`sdpa`    torch's own operators over gathered blocks (`paged_attention.py`): the reference, and what the CPU takes.
`triton`  this project's kernels (`triton_attention.py`): what CUDA takes.
`varlen`  torch's `varlen_attn` with a block table (`varlen_attention.py`), from torch 2.12 on.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mini_engine.config import AttentionBackendName, ConfigError
from mini_engine.kernels.ops import triton_obstacle
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.paged_attention import SdpaBackend, Span

FLASH_BLOCK = 256  # torch: "Paged KV cache block size must be divisible by 256"


class StepAttention(Protocol):
    """The `attend` hook of one step; see `model.text.Attend`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keeps k and v in the cache, then attends."""

    def advance(self, slots: Tensor, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> bool:
        """Go on to the next step, where every span is one token past the last: they were all single tokens.

        Args:
            slots: as at the start.
            contexts: int64 `[n]`, with the new tokens.
            entered: (row, block) of those whose new token is the first in a block.

        Returns:
            False: build anew; this object is of no more use.
        """


class AttentionBackend(Protocol):
    """Makes the attention of each step over one cache."""

    reads_masked: bool  # keys and values past a context are read, so a new block must hold finite numbers

    @property
    def cache(self) -> KVCache:
        """Where keys and values are kept."""

    def step(self, slots: Tensor, spans: Sequence[Span]) -> StepAttention:
        """For a step with these chunks.

        Args:
            slots: int64 `[n]` on the cache's device, where each of the step's tokens is kept.
            spans: the chunks in the order of their rows, which is that of `attention_order`.
        """


def choose_backend(wanted: AttentionBackendName, device: torch.device) -> AttentionBackendName:
    """What `--attention-backend` means on this device.

    Raises:
        ConfigError: it cannot run here, or the small operators, which are Triton's with any where Triton can run,
            cannot; it says why.
    """
    fused = device.type == "cuda" and triton_obstacle(device) is None
    if fused:
        _check_compiler()
    if wanted == "auto":
        return "triton" if fused else "sdpa"
    obstacles: dict[str, Callable[[torch.device], str | None]] = {"triton": triton_obstacle, "varlen": varlen_obstacle}
    obstacle = obstacles[wanted](device) if wanted in obstacles else None
    if obstacle:
        raise ConfigError(f"--attention-backend {wanted}: {obstacle}; choose auto")
    return wanted


def make_backend(name: AttentionBackendName, cache: KVCache, longest: int) -> AttentionBackend:
    """A backend that `choose_backend` has chosen, for contexts of up to `longest` tokens.

    Raises:
        ConfigError: it cannot read such a cache; the text says why.
    """
    if name == "triton":
        from mini_engine.worker.triton_attention import TritonBackend

        return TritonBackend(cache, longest)
    if name == "varlen":
        from mini_engine.worker.varlen_attention import VarlenBackend

        obstacle = flash_obstacle(cache)
        if obstacle:
            raise ConfigError(f"--attention-backend varlen: {obstacle}, or choose auto")
        return VarlenBackend(cache)
    return SdpaBackend(cache)


def _check_compiler() -> None:
    """Triton compiles, at the first use of a kernel, what launches it: an extension of Python, in C.

    Raises:
        ConfigError: there is no compiler, or no Python.h where it would look.
    """
    needs = "Triton needs a C compiler and Python's headers at the first use of a kernel"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise ConfigError(f"{needs}, and there is no compiler: install gcc and libc6-dev, or name one in CC")
    # As triton/runtime/build.py has it: Debian's own scheme is for what lies beside its packages, and headers are one.
    scheme = sysconfig.get_default_scheme()
    own = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    named = ":".join(os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH"))  # which compilers heed
    if not any(Path(place, "Python.h").is_file() for place in (own, *filter(None, named.split(":")))):
        raise ConfigError(
            f"{needs}, and there is no {own}/Python.h: install python3-dev, or name its directory in CPATH"
        )


def varlen_obstacle(device: torch.device) -> str | None:
    """Why torch's `varlen_attn` cannot serve on this device; None if it can."""
    if device.type != "cuda":
        return f"torch's varlen_attn needs CUDA, and the worker runs on {device.type}"
    from torch.nn.attention.varlen import varlen_attn

    missing = {"block_table", "seqused_k", "enable_gqa"} - set(inspect.signature(varlen_attn).parameters)
    if missing:
        return f"varlen_attn of torch {torch.__version__} takes no {', '.join(sorted(missing))}; it does from 2.12 on"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's varlen_attn needs a device of compute capability 8.0 or more"
    return None


def flash_obstacle(cache: KVCache) -> str | None:
    """Why FlashAttention, by which torch's `varlen_attn` follows a block table, cannot read this cache; None if it can.

    cuDNN would read other caches too, but not as they are here: see `leave_out_cudnn`.
    """
    dtype, dim = str(cache.storage.dtype).removeprefix("torch."), cache.storage.shape[5]
    if dtype not in ("bfloat16", "float16"):
        return f"FlashAttention computes in bfloat16 and float16, not in {dtype}; set --dtype bfloat16"
    if cache.block_size % FLASH_BLOCK:
        return (
            f"FlashAttention reads blocks of a multiple of {FLASH_BLOCK} tokens, not of {cache.block_size}; "
            f"set --block-size {FLASH_BLOCK}"
        )
    if dim % 8 or dim > 256:
        return f"FlashAttention takes heads of a multiple of 8 up to 256, not of {dim}; serve another model"
    return None


def leave_out_cudnn() -> None:
    """Have torch compute attention by its other kernels, in this process.

    On a Hopper torch prefers cuDNN's, which builds a plan for every new shape before it computes; and here
    every video brings new shapes, and every step of `sdpa` and `varlen`. For a block table cuDNN also wants one exactly
    as wide as the longest sequence.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
