"""The kernels through Triton's compiler for devices from Ampere to Blackwell, at a large model's shapes. No device is
needed for that, and it finds what the interpreter does not look at: types, shapes of products, shared memory,
registers."""

import itertools
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mini_engine.kernels import elementwise, paged, triton_experts  # noqa: E402
from mini_engine.kernels import token_draw as sampling  # noqa: E402
from mini_engine.kernels import triton_delta_rule as delta_rule  # noqa: E402
from mini_engine.kernels.elementwise import padded  # noqa: E402
from mini_engine.matmul import triton_matmul  # noqa: E402

SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes of one program
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FEW, MANY = triton_matmul.SHAPES


def combinations(by_default: Sequence[tuple[Any, ...]], *axes: Iterable[Any]) -> list[Any]:
    """All of them; `by_default` are those that are not slow."""
    cases = [*itertools.product(*axes)]
    assert all(case in cases for case in by_default)
    return [pytest.param(*case, marks=[] if case in by_default else [pytest.mark.slow]) for case in cases]


def types_of(dtype: str) -> dict[str, str]:
    """Of each argument of any kernel, by its name; those that are not here are strides and counts."""
    names = [
        (f"*{dtype}", "out y x outputs shared gate q keys values k v qkv q_weight k_weight"),
        (f"*{dtype}", "residual weight gates mixed conv kernel"),
        ("*fp32", "parts weights sums cos sin frequencies mean std scores factors maps delta A_log dt_bias"),
        ("*fp64", "parameters"),
        ("*i64", "positions axis cache_indices state_indices rows tokens"),
        ("*i32", "tables contexts tiles counts bars locks ends sources targets order chosen scales"),
        ("*u8", "patches codes"),
        ("fp32", "scale eps masked"),
    ]
    return {name: kind for kind, group in names for name in group.split()}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_for(
    target: int, kernel: Any, types: Mapping[str, str], fixed: Mapping[str, Any], warps: int, stages: int = 3
) -> Any:
    """The compiled kernel; pointers and strides are multiples of 16, as the engine's mostly are."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name.endswith("stride")]
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def in_flight(compiled: Any) -> int:
    """Most asynchronous copies that a wait leaves unfinished."""
    return max(int(number) for number in re.findall(r"async_wait .*num = (\d+)", compiled.asm["ttgir"]))


def stack_bytes(compiled: Any, path: Path) -> int:
    """Of one thread: what did not fit its registers."""
    path.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


@pytest.mark.parametrize(
    ("target", "dim", "dtype", "kind"),  # of chunks, and query heads for each key head
    combinations(
        [(90, 128, "bf16", (True, 7)), (100, 80, "fp16", (False, 7)), (120, 256, "bf16", (False, 7))],
        SHARED_MEMORY, (64, 80, 128, 256), WIDTHS, ((False, 7), (True, 7), (True, 8)),
    ),
)  # fmt: skip
def test_attention(target: int, dim: int, dtype: str, kind: tuple[bool, int], tmp_path: Path):
    chunks, group = kind
    shape = paged.shape_of(chunks, group, dim, WIDTHS[dtype], SHARED_MEMORY[target])
    fixed = paged.constants(shape, chunks, group, dim, 16)
    compiled = compile_for(target, paged._attend, types_of(dtype), fixed, shape.warps, paged.STAGES)
    assert compiled.metadata.shared <= SHARED_MEMORY[target]
    assert stack_bytes(compiled, tmp_path / "cubin") <= (8 if WIDTHS[dtype] == 2 else 64)  # 0 but for Triton 3.9 on 100
    assert in_flight(compiled) > 0, "copies overlap the products"
    if WIDTHS[dtype] == 2:
        unit = {90: "wgmma", 100: "tcgen05"}.get(target, "mma.sync") if chunks else "mma.sync"
        assert unit in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("target", "dtype", "dim"), combinations([(120, "bf16", 256)], SHARED_MEMORY, WIDTHS, (64, 80, 128, 256))
)
def test_join_of_splits(target: int, dtype: str, dim: int, tmp_path: Path):
    size = {"DIM": dim, "PADDED": padded(dim, 16), "N": paged.JOIN_SPLITS}
    compiled = compile_for(target, paged._join, types_of(dtype), size, paged.JOIN_WARPS)
    assert compiled.metadata.shared <= SHARED_MEMORY[target]
    assert stack_bytes(compiled, tmp_path / "cubin") <= (0 if WIDTHS[dtype] == 2 else 64)


@pytest.mark.parametrize("dtype", combinations([("bf16",)], ("bf16", "fp32")))
def test_small_operators(dtype: str):
    columns = {"SIZE": 3420, "DIM": 1024, "PADDED": 1024, "ROWS": 1, "weight": None}
    heads = {"DIM": 80, "PADDED": 128, "HALF": 20, "ROWS": 8, "OFFSET": 1}
    small = (
        (elementwise._rms_norm, {"SIZE": 3584, "PADDED": 4096, "OFFSET": True}),
        (elementwise._mul_gate, columns | {"SILU": False}),
        (elementwise._mul_gate, {"SIZE": 4096, "DIM": 128, "PADDED": 128, "ROWS": 8, "SILU": True}),
        (elementwise._rotate_heads, heads | {"HEADS": 16, "KV_HEADS": 4}),
        (elementwise._rotate_heads, heads | {"HEADS": 32, "KV_HEADS": 0, "q_weight": None, "k_weight": None}),
        (elementwise._penalise, {"SIZE": 152064, "COLUMNS": 1024}),
        (elementwise._mask_tokens, {"SIZE": 152064, "COLUMNS": 1024}),
    )
    for kernel, fixed in small:
        assert "st.global" in compile_for(90, kernel, types_of(dtype), fixed, 8).asm["ptx"]


def test_around_products():
    around = (
        (triton_experts._choose, {"SIZE": 128, "PADDED": 128, "EACH": 8, "TOP": 8}),
        (triton_experts._sort, {"BLOCK": triton_experts.PAIRS}),
        (triton_experts._combine, {"SIZE": 2048, "EACH": 8, "COLUMNS": 1024}),
        (triton_matmul._unpack, triton_matmul.unpack_constants(torch.bfloat16, 128)),
    )
    for kernel, fixed in around:
        assert "st.global" in compile_for(90, kernel, types_of("bf16"), fixed, 4).asm["ptx"]


@pytest.mark.parametrize(("target", "dtype"), combinations([(90, "bf16")], SHARED_MEMORY, ("bf16", "fp16")))
def test_gated_delta_rule(target: int, dtype: str, tmp_path: Path):
    """Qwen3.5-4B's sizes."""
    types, scan_warps = types_of(dtype), delta_rule.scan_warps(dtype == "bf16", SHARED_MEMORY[target])
    sizes = {"KEYS": 16, "HEADS": 32, "K": 128, "V": 128, "PADDED": 128}
    conv = {"CHANNELS": 8192, "SIZE": 4, "PADDED": 4, "COLUMNS": delta_rule.CONV_CHANNELS}
    rule = (
        (delta_rule._convolve, conv | {"TOKENS": 1}, 4),
        (delta_rule._convolve, conv | {"state_indices": None, "TOKENS": delta_rule.CONV_TOKENS}, 4),
        (delta_rule._decode, sizes | {"EPS": 1e-6, "COLUMNS": delta_rule.DECODE_COLUMNS}, 4),
        (delta_rule._relate, sizes | {"EPS": 1e-6, "N": delta_rule.CHUNK}, 2),
        (delta_rule._scan, sizes | {"COLUMNS": delta_rule.SCAN_COLUMNS, "N": delta_rule.CHUNK}, scan_warps),
    )
    for kernel, fixed, warps in rule:
        compiled = compile_for(target, kernel, types, fixed, warps)
        assert compiled.metadata.shared <= 99 << 10
        assert stack_bytes(compiled, tmp_path / "cubin") == 0
    assert in_flight(compiled) > 0, "copies overlap the products"


@pytest.mark.parametrize(
    ("target", "codes", "experts", "shape"),
    combinations([(90, "*u8", 1, MANY), (80, "*i8", 128, FEW)],
                 SHARED_MEMORY, ("*u8", "*i8", "*bf16"), (1, 128), (FEW, MANY)),
)  # fmt: skip
def test_products_with_weights_as_they_lie(
    target: int, codes: str, experts: int, shape: triton_matmul.ProductShape, tmp_path: Path
):
    scales, group = {"*u8": ("*i32", 128), "*i8": ("*fp32", 0), "*bf16": ("", 0)}[codes]
    types = types_of("bf16") | {"codes": codes, "scales": scales}
    absent = {} if scales else {"scales": None}
    if experts == 1:
        absent |= dict.fromkeys(("ends", "sources", "targets"))
    fixed = triton_matmul.constants(shape, torch.bfloat16, 2560, 4096, group, experts, 8) | absent
    compiled = compile_for(target, triton_matmul._multiply, types, fixed, shape.warps, shape.stages)
    assert compiled.metadata.shared <= 99 << 10
    assert stack_bytes(compiled, tmp_path / "cubin") <= 8
    assert in_flight(compiled) >= 2, "copies of weights and of x overlap the products"
    assert "mma" in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_draw_keeps_tiles_in_registers(target: int, tmp_path: Path):
    fixed = {"SIZE": 151936, "START": 151936, "TILE": sampling.TILE}
    compiled = compile_for(target, sampling._draw, types_of("fp32"), fixed, sampling.WARPS)
    assert stack_bytes(compiled, tmp_path / "cubin") <= 40
    loads = re.findall(r"ld\.global\S*", compiled.asm["ptx"])
    assert sum(".v4" in load for load in loads) >= len(loads) - 4, "all but the parameters"
