"""The kernels through Triton's compiler for a Hopper device, at a large model's shapes. No device is needed for that,
and it finds what the interpreter does not look at: types, shapes of products, shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mini_engine.kernels import elementwise, paged  # noqa: E402
from mini_engine.kernels.elementwise import padded  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 99 << 10  # bytes a block may take on any device from Ampere on; a Hopper has 227 KiB
WIDTHS = {"bf16": 2, "fp32": 4}


def types_of(dtype: str) -> dict[str, str]:
    """Of each argument of any kernel, by its name; those that are not here are strides and counts."""
    names = [
        (f"*{dtype}", "out q keys values k v qkv q_weight k_weight x residual weight gate_up"),
        ("*fp32", "parts sums cos sin frequencies mean std scores factors"),
        ("*i64", "positions axis slots rows"),
        ("*i32", "tables contexts tiles counts"),
        ("*u8", "patches"),
        ("fp32", "scale eps"),
    ]
    return {name: kind for kind, some in names for name in some.split()}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_for_hopper(
    kernel: Any, types: Mapping[str, str], fixed: Mapping[str, int | bool | None], shape: paged.Shape
) -> Any:
    """The compiled kernel; pointers and strides are multiples of 16, as the engine's mostly are."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name.endswith("stride")]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )  # fmt: skip
    return triton.compile(source, target=HOPPER, options={"num_warps": shape.warps, "num_stages": shape.stages})


@pytest.mark.parametrize(("dim", "group", "dtype"), [(128, 7, "bf16"), (80, 8, "fp32")])
def test_attention(dim: int, group: int, dtype: str):
    types = types_of(dtype)
    common = {"GROUP": group, "DIM": dim, "PADDED": padded(dim, 16), "BLOCK_SIZE": 16}
    shape = paged.decode_shape(group, WIDTHS[dtype])
    split = {"ROWS": shape.rows, "N": shape.keys, "LEAST": paged.LEAST_SPLIT}
    one, wide = types | {"sums": f"*{dtype}"}, types | {"out": "*fp32"}
    alone = compile_for_hopper(paged._decode, one, common | split | {"SPLITS": 1}, shape)
    parts = compile_for_hopper(paged._decode, wide, common | split | {"SPLITS": 8}, shape)
    shape = paged.prefill_shape(group, WIDTHS[dtype])
    chunk = compile_for_hopper(paged._prefill, one, common | {"ROWS": shape.rows, "N": shape.keys}, shape)
    for compiled in (alone, parts, chunk):
        assert compiled.metadata.shared <= SHARED_MEMORY
        assert "ld.global" in compiled.asm["ptx"] or "cp.async" in compiled.asm["ptx"]
    if WIDTHS[dtype] == 2:
        assert "mma" in alone.asm["ptx"] and "wgmma" in chunk.asm["ptx"], "the matrix units are used"


@pytest.mark.parametrize("dtype", WIDTHS)
def test_small_operators(dtype: str):
    heads = {"DIM": 80, "PADDED": 128, "HALF": 20, "ROWS": 8, "OFFSET": 1}
    for kernel, fixed in (
        (paged._join, {"DIM": 80, "PADDED": 128, "N": 64, "SPLITS": 64, "LEAST": 256}),
        (elementwise._rms_norm, {"SIZE": 3584, "PADDED": 4096, "ADD": True, "OFFSET": True}),
        (elementwise._silu_mul, {"SIZE": 3420, "COLUMNS": 1024}),
        (elementwise._rotate_heads, heads | {"HEADS": 16, "KV_HEADS": 4}),
        (elementwise._rotate_heads, heads | {"HEADS": 32, "KV_HEADS": 0, "q_weight": None, "k_weight": None}),
        (elementwise._mrope, {"HALF": 40, "HALF_PADDED": 64}),
        (elementwise._normalise, {"SIZE": 1176, "CHANNEL": 392, "COLUMNS": 1024}),
        (elementwise._penalise, {"SIZE": 152064, "COLUMNS": 1024}),
    ):
        compiled = compile_for_hopper(kernel, types_of(dtype), fixed, paged.Shape(0, 0, 8, 3))
        assert "st.global" in compiled.asm["ptx"]
