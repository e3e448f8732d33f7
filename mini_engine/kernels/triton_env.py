"""What all kernels share: how they are compiled, whether Triton's interpreter runs them, and a product that the
interpreter gets right.

Kernels are launched on the current CUDA device and stream. A worker makes its device current once, at its start, so no
launch pays for a guard; other callers of these functions must do the same first.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# A product and a sum become one operation, with one rounding. Without it Triton 3.9 warns, and 3.10 will not do it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def matmul(a, b):
    """`a b` in float32, of two blocks of one dtype; float32 is not cut to TF32."""
    if INTERPRETED:
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


def padded(size: int, least: int = 1) -> int:
    """The power of two that holds `size`: the shapes of Triton's blocks are powers of two."""
    return max(least, triton.next_power_of_2(size))
