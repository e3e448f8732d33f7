"""How files store the matrices of a layer's experts.

Each by itself, as in quantised checkpoints but for some in FP8: `mlp.experts.3.gate_proj.weight` and `up_proj` are
`[I, H]`, `down_proj` is `[H, I]`; the layers use these names. Or those of all E experts in one tensor, gate before up:

| | `mlp.experts.gate_up_proj` | `mlp.experts.down_proj` |
|---|---|---|
| as transformers has them | `[E, 2 I, H]` | `[E, H, I]` |
| transposed | `[E, H, 2 I]` | `[E, I, H]` |

FP8 adds `_scale_inv` to both names, with blocks in place of values. Published Qwen3-VL checkpoints are transposed, but
transformers 5 saves the same model as it has it; it tells them by their shapes, and so does `split_experts`.
"""

import re
from collections.abc import Iterator, Mapping

from mini_engine.model.checkpoint import DTYPES, Stored

ALL_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale_inv|)")
MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_experts(tensors: Mapping[str, Stored], hidden_size: int, transposed: bool, block: int) -> dict[str, Stored]:
    """The same tensors, by name, but those of all experts as views of each expert's matrices. One that cannot be cut
    into these stays as it is, a tensor that no layer has.

    Args:
        hidden_size: the decoder's width.
        transposed: whether published files of its family have transposed tensors of all experts.
        block: outputs that share a scale in FP8.
    """
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        match = ALL_EXPERTS.fullmatch(name)
        if match is None or len(stored.shape) != 3 or stored.dtype not in DTYPES:
            found[name] = stored
            continue
        experts, kind, end = match.groups()
        weight = tensors.get(f"{experts}.{kind}", stored)
        is_transposed = transposed and weight.shape[1 if kind == "gate_up_proj" else -1] == hidden_size
        names, axis = MATRICES[kind], 2 if is_transposed else 1
        rows, outputs = stored.shape[axis], weight.shape[axis]
        is_blocks = rows == -(-outputs // block)
        # Gate and up share a row, or a block of FP8.
        if rows % len(names) or (is_blocks and (outputs - outputs // len(names)) % block):
            found[name] = stored
            continue
        for expert, views in enumerate(_views(stored, len(names), is_transposed)):
            for matrix, view in zip(names, views, strict=True):
                found[f"{experts}.{expert}.{matrix}.weight{end}"] = view
    return found


def _views(stored: Stored, parts: int, is_transposed: bool) -> Iterator[list[Stored]]:
    """For each expert its matrices `[outputs, inputs]`, of which `parts` are below each other, or side by side."""
    count, first, last = stored.shape
    width, inputs = (last, first) if is_transposed else (first, last)
    outputs = width // parts
    for expert in range(count):
        views = []
        for start in range(0, outputs * parts, outputs):
            at = expert * width * inputs + (0 if is_transposed else start * inputs)
            offset = stored.offset + at * DTYPES[stored.dtype].itemsize
            columns = (slice(start, start + outputs), width) if is_transposed else None
            views.append(Stored(stored.file, stored.name, (outputs, inputs), stored.dtype, offset, columns))
        yield views
