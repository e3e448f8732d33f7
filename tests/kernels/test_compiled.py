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
from mini_engine.kernels.triton_env import padded  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 99 << 10  # bytes a block may take on any device from Ampere on; a Hopper has 227 KiB
WIDTHS = {"bf16": 2, "fp32": 4}
STRIDES = dict.fromkeys(("q_stride", "table_stride", "block_stride", "place_stride", "heads"), "i32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_for_hopper(
    kernel: Any, types: Mapping[str, str], fixed: Mapping[str, int | bool], shape: paged.Shape
) -> Any:
    """The compiled kernel; pointers and strides are multiples of 16, as the engine's mostly are."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name.endswith("stride")]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )  # fmt: skip
    return triton.compile(source, target=HOPPER, options={"num_warps": shape.warps, "num_stages": shape.stages})


@pytest.mark.parametrize(("dim", "group", "dtype"), [(128, 7, "bf16"), (80, 8, "fp32")])
def test_attention(dim: int, group: int, dtype: str):
    types = {**STRIDES, "tables": "*i32", "contexts": "*i32", "tiles": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("q", "keys", "values"), f"*{dtype}")
    common = {"GROUP": group, "DIM": dim, "PADDED": padded(dim, 16), "BLOCK_SIZE": 16}
    shape = paged.decode_shape(group, WIDTHS[dtype])
    split = {"ROWS": shape.rows, "N": shape.keys, "LEAST": paged.LEAST_SPLIT}
    one, wide = ({"out": f"*{name}", "sums": f"*{name}"} for name in (dtype, "fp32"))
    alone = compile_for_hopper(paged._decode, types | one, common | split | {"SPLITS": 1}, shape)
    parts = compile_for_hopper(paged._decode, types | wide, common | split | {"SPLITS": 8}, shape)
    shape = paged.prefill_shape(group, WIDTHS[dtype])
    chunk = compile_for_hopper(paged._prefill, types | one, common | {"ROWS": shape.rows, "N": shape.keys}, shape)
    for compiled in (alone, parts, chunk):
        assert compiled.metadata.shared <= SHARED_MEMORY
        assert "ld.global" in compiled.asm["ptx"] or "cp.async" in compiled.asm["ptx"]
    if WIDTHS[dtype] == 2:
        assert "mma" in alone.asm["ptx"] and "wgmma" in chunk.asm["ptx"], "the matrix units are used"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_small_operators(dtype: str):
    shape = paged.Shape(0, 0, 8, 3)
    one, wide = f"*{dtype}", "*fp32"
    for kernel, types, fixed in (
        (paged._join, {"out": one, "parts": wide, "sums": wide, "contexts": "*i32", "heads": "i32"},
         {"DIM": 80, "PADDED": 128, "N": 64, "SPLITS": 64, "LEAST": 256}),
        (elementwise._rms_norm, {"out": one, "x": one, "residual": one, "weight": one, "eps": "fp32", "stride": "i32"},
         {"SIZE": 3584, "PADDED": 4096, "ADD": True}),
        (elementwise._silu_mul, {"out": one, "gate_up": one, "stride": "i32"}, {"SIZE": 3420, "COLUMNS": 1024}),
        (elementwise._rotate, {"out": one, "x": one, "cos": wide, "sin": wide, "x_stride": "i32"},
         {"HEADS": 28, "HEADS_PADDED": 32, "HALF": 40, "HALF_PADDED": 64}),
        (elementwise._mrope, {"cos": wide, "sin": wide, "positions": "*i64", "axis": "*i64", "frequencies": wide,
                              "count": "i32"}, {"HALF": 40, "HALF_PADDED": 64}),
        (elementwise._normalise, {"out": one, "patches": "*u8", "mean": wide, "std": wide},
         {"SIZE": 1176, "CHANNEL": 392, "COLUMNS": 1024}),
        (elementwise._write_cache, {"keys": one, "values": one, "k": one, "v": one, "slots": "*i64",
                                    "k_stride": "i32", "v_stride": "i32"}, {"SIZE": 512, "PADDED": 512}),
        (elementwise._penalise, {"scores": wide, "counts": "*i32", "rows": "*i64", "factors": wide},
         {"SIZE": 152064, "COLUMNS": 1024}),
    ):  # fmt: skip
        assert "st.global" in compile_for_hopper(kernel, types, fixed, shape).asm["ptx"]
