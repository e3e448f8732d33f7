"""Fills a model from safetensors files, reading of each tensor only what this rank holds.

Knows both name layouts of the hub: `model.layers.*`, `visual.*` (old) and `model.language_model.*`, `model.visual.*`
(new); one file or several with an index.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import Piece, pieces_of
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD = "lm_head.weight"
# An error that lists thousands of names hides its own message.
MAX_LISTED = 8


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
    path: str | Path, tp: TensorParallel, dtype: torch.dtype | None, device: torch.device
) -> VisionLanguageModel:
    """Build the model of a directory and fill it.

    Args:
        path: holds `config.json` and the safetensors.
        tp: this rank's place.
        dtype: of the parameters; None takes the checkpoint's own.
        device: where they are made; each slice is read and copied there by itself, so that no rank ever holds a second
            copy of more than one slice.

    Raises:
        FileNotFoundError: config or weights are not there.
        ValueError: unsupported architecture or setting, heads that do not divide, weights that do not match.
    """
    config = ModelConfig.from_dir(path)
    placement = Placement(tp, dtype or getattr(torch, config.dtype), device)
    model = VisionLanguageModel(config, placement)
    load_weights(model, path)
    return model.eval()


def load_weights(model: nn.Module, path: str | Path) -> int:
    """Fill all parameters from a directory; returns the bytes read from its tensors.

    All names and shapes are checked before anything is read. Raises FileNotFoundError, or ValueError naming what is
    missing, unexpected or wrongly shaped.
    """
    with ExitStack() as files:
        found = _open(Path(path), files)
        pieces = list(pieces_of(model))
        _check(pieces, found)
        return sum(_fill(piece, found[piece.source]) for piece in pieces)


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


def canonical_name(name: str) -> str:
    """A checkpoint's name of a weight in the newer layout."""
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def _open(directory: Path, files: ExitStack) -> dict[str, Any]:
    """Canonical name -> safetensors slice, of every tensor in the directory. Reads headers only."""
    found: dict[str, Any] = {}
    for path in _files(directory):
        handle = files.enter_context(safe_open(path, framework="pt"))
        found |= {canonical_name(name): handle.get_slice(name) for name in handle.keys()}
    return found


def _files(directory: Path) -> Iterator[Path]:
    index = directory / INDEX_FILE
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        yield from (directory / name for name in sorted(set(names)))
    elif (directory / SINGLE_FILE).exists():
        yield directory / SINGLE_FILE
    else:
        raise FileNotFoundError(f"neither {SINGLE_FILE} nor {INDEX_FILE} in {directory}")


def _check(pieces: list[Piece], found: dict[str, Any]) -> None:
    wanted = {piece.source: piece.shape for piece in pieces}
    # With tied embeddings some checkpoints store the head as well; it is the same matrix.
    unexpected = [name for name in found if name not in wanted and name != HEAD and not name.endswith(".inv_freq")]
    missing = [name for name in wanted if name not in found]
    misshaped = [
        f"{name} is {tuple(found[name].get_shape())}, not {shape}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name].get_shape()) != shape
    ]
    problems = [
        f"{what}: {', '.join(names[:MAX_LISTED])}"
        + (f" and {len(names) - MAX_LISTED} more" * (len(names) > MAX_LISTED))
        for what, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshaped))
        if names
    ]
    if problems:
        raise ValueError(f"the weights do not fit config.json; {'; '.join(problems)}")


def _fill(piece: Piece, stored: Any) -> int:
    part = stored[piece.index]
    # Converts dtype and moves to the device in one pass, slice by slice.
    piece.target.copy_(part)
    return part.numel() * part.element_size()
