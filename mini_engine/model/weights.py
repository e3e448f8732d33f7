"""Builds a rank's part of a model and fills it: from safetensors files, reading of each tensor only what this rank
holds, or with random values.

Which parts these are the layers say (`layers.Piece`); which names a family's checkpoints use says its spec.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mini_engine.model.checkpoint import CheckpointError, Reader, Stored, find_tensors, shorten
from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import Piece, pieces_of
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.registry import find_spec
from mini_engine.model.vision_language import VisionLanguageModel

HEAD = "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")
DUMMY_SPREAD = 0.035  # of uniform values: their deviation is 0.02, as transformers starts these models
DUMMY_ROWS_BYTES = 64 << 20

LoadFormat = Literal["auto", "safetensors", "dummy"]


@dataclass
class ParameterReport:
    """Bytes of one rank's parameters.

    sharded: bytes of those of which no other rank holds the same part.
    sharded_total: what all ranks together hold of these tensors.
    replicated: bytes of each tensor (checkpoint names) that other ranks hold as well.
    """

    sharded: int = 0
    sharded_total: int = 0
    replicated: dict[str, int] = field(default_factory=dict)


def load_model(
    path: str | Path,
    tp: TensorParallel,
    dtype: torch.dtype | None,
    device: torch.device,
    load_format: LoadFormat = "auto",
    spread_tower: bool = False,
) -> VisionLanguageModel:
    """Build the model of a directory and fill it.

    Args:
        path: holds `config.json` and, unless `load_format` is "dummy", the safetensors.
        tp: this rank's place.
        dtype: of the parameters; None takes the checkpoint's own.
        device: where they are made; each slice is read and copied there by itself, so that no rank ever holds a second
            copy of more than a few slices.
        load_format: "dummy" fills with random values instead, the same model whatever the number of ranks.
        spread_tower: whether this rank holds the whole vision tower; see `Placement`.

    Raises:
        FileNotFoundError: config.json is not there.
        CheckpointError: the weights are not there, cannot be read or do not match.
        ValueError: unsupported architecture or setting, heads that do not divide.
    """
    config = ModelConfig.from_dir(path)
    model = VisionLanguageModel(config, Placement(tp, dtype or getattr(torch, config.dtype), device, spread_tower))
    if load_format == "dummy":
        fill_randomly(model)
    else:
        load_weights(model, path, find_spec([config.architecture]).canonical_name)
    return model.eval()


def load_weights(model: nn.Module, path: str | Path, canonical_name: Callable[[str], str]) -> int:
    """Fill all parameters from a directory; returns the bytes read from its tensors.

    `canonical_name` turns a checkpoint's name of a weight into the one by which the layers ask for it. All names and
    shapes are checked before anything is read. Raises CheckpointError naming what is missing, unexpected or wrong.
    """
    found = find_tensors(Path(path), canonical_name)
    pieces = list(pieces_of(model))
    _check(pieces, found, path)
    pieces.sort(key=lambda piece: found[piece.source].file)
    read = 0
    with Reader() as files:
        for piece in pieces:
            part = files.read(found[piece.source], piece.index)
            # Converts dtype and moves to the device in one pass, slice by slice.
            piece.target.copy_(part)
            read += part.nbytes
            del part
    return read


def fill_randomly(model: nn.Module) -> None:
    """Fill all parameters with small random values, norms with values near one.

    A value depends on its tensor's name and its place in the whole tensor alone, so that any number of ranks hold the
    parts of one and the same model; nothing that another rank holds is computed. The numbers are made on the device.
    """
    for piece in pieces_of(model):
        is_norm = len(piece.shape) == 1 and piece.source.endswith(".weight")
        for rows, target in _in_runs(piece):
            target.copy_(_noise(piece, rows)).mul_(DUMMY_SPREAD / 2**15).add_(float(is_norm))


def parameter_report(model: nn.Module) -> ParameterReport:
    """What of a rank's parameters is its own and what is replicated, with names."""
    report = ParameterReport()
    for piece in pieces_of(model):
        width = piece.target.element_size()
        if piece.copies == 1:
            report.sharded += piece.target.numel() * width
        else:
            held = report.replicated.get(piece.source, 0)
            report.replicated[piece.source] = held + piece.target.numel() * width
    whole = {p.source: p for p in pieces_of(model) if p.copies == 1}
    report.sharded_total = sum(torch.Size(p.shape).numel() * p.target.element_size() for p in whole.values())
    return report


def _check(pieces: list[Piece], found: dict[str, Stored], path: str | Path) -> None:
    wanted = {piece.source: piece.shape for piece in pieces}
    # With tied embeddings some checkpoints store the head as well; it is the same matrix.
    unexpected = [name for name in found if name not in wanted and name != HEAD and not name.endswith(".inv_freq")]
    missing = [name for name in wanted if name not in found]
    there = {name: found[name] for name in wanted if name in found}
    misshaped = [f"{name} is {s.shape}, not {wanted[name]}" for name, s in there.items() if s.shape != wanted[name]]
    quantised = [f"{name} is {s.dtype}" for name, s in there.items() if s.dtype not in FLOATS]
    problems = [
        f"{what}: {shorten(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrong shape", misshaped),
            ("not floating point", quantised),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {path} do not fit its config.json; {'; '.join(problems)}; "
            "take all files from one unquantised checkpoint"
        )


def _in_runs(piece: Piece) -> Iterator[tuple[slice, Tensor]]:
    """The piece in runs of rows, so that what is computed on the way stays small: rows of the checkpoint's tensor."""
    first = piece.index[0].start
    step = max(1, DUMMY_ROWS_BYTES // (4 * max(1, piece.target[0].numel())))
    for start in range(0, len(piece.target), step):
        target = piece.target[start : start + step]
        yield slice(first + start, first + start + len(target)), target


def _noise(piece: Piece, rows: slice) -> Tensor:
    """Integers, uniform from -2**15 to 2**15, of these rows of the piece.

    The high half of a product of two odd random numbers, one of the row and one of the column, modulo 2**32.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(piece.source.encode()))

    def odd(count: int) -> Tensor:
        drawn = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
        return drawn.to(torch.int32) | 1

    device, inner = piece.target.device, piece.shape[1:]
    of_row, of_column = odd(piece.shape[0]), odd(torch.Size(inner).numel())
    of_row = of_row[rows].to(device).view(-1, *[1] * len(inner))
    of_column = of_column.view(inner)[piece.index[1:]].to(device)
    return (of_row * of_column) >> 16
