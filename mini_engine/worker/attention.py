"""Which attention a worker computes with: what a backend offers, and the choice of one.

`sdpa`    torch's own operators over gathered blocks (`paged_attention.py`): the reference, and what the CPU takes.
`triton`  this project's kernels (`triton_attention.py`): what CUDA takes.
`varlen`  torch's `varlen_attn` with a block table (`varlen_attention.py`), from torch 2.12 on.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mini_engine.config import AttentionBackendName, ConfigError
from mini_engine.kernels import ops
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.paged_attention import SdpaBackend, Span


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
        ConfigError: it cannot run here, or the small operators, which are Triton's with any, cannot; it says why.
    """
    if device.type == "cuda" and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise ConfigError(
            "Triton needs a C compiler at the first use of a kernel, and there is none: install gcc and libc6-dev, "
            "or name one in CC"
        )
    if wanted == "auto":
        return "triton" if device.type == "cuda" and triton_obstacle(device) is None else "sdpa"
    obstacle = {"triton": triton_obstacle, "varlen": varlen_obstacle}.get(wanted, lambda _: None)(device)
    if obstacle:
        raise ConfigError(f"--attention-backend {wanted}: {obstacle}; choose auto")
    return wanted


def make_backend(name: AttentionBackendName, cache: KVCache, longest: int) -> AttentionBackend:
    """A backend that `choose_backend` has chosen, for contexts of up to `longest` tokens."""
    if name == "triton":
        from mini_engine.worker.triton_attention import TritonBackend

        return TritonBackend(cache, longest)
    if name == "varlen":
        from mini_engine.worker.varlen_attention import VarlenBackend

        return VarlenBackend(cache)
    return SdpaBackend(cache)


def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on this device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton beside this torch; install a torch for CUDA"
    if not ops.fused(torch.empty(0, device=device)):
        return f"Triton's kernels need CUDA, and the worker runs on {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton's kernels need a device of compute capability 8.0 or more"
    return None


def varlen_obstacle(device: torch.device) -> str | None:
    """Why torch's `varlen_attn` cannot serve on this device; None if it can."""
    if device.type != "cuda":
        return f"torch's varlen_attn needs CUDA, and the worker runs on {device.type}"
    from torch.nn.attention.varlen import varlen_attn

    missing = {"block_table", "seqused_k", "enable_gqa"} - set(inspect.signature(varlen_attn).parameters)
    if missing:
        return f"varlen_attn of torch {torch.__version__} takes no {', '.join(sorted(missing))}; it does from 2.12 on"
    return None
