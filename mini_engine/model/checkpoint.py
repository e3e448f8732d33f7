"""The safetensors files of a model directory: which file holds which tensor.

Knows nothing of models: a given mapping converts names.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# An error that lists thousands of names hides its own message.
MAX_LISTED = 8


class CheckpointError(ValueError):
    """Weights that cannot be used. The text names the directory or file, what is wrong with it, and the remedy."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint. `dtype` is safetensors' name, such as "BF16"."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def find_tensors(directory: Path, rename: Callable[[str], str]) -> dict[str, Stored]:
    """Every tensor of the checkpoint by its name after `rename`, from headers alone: with an index, of its files and as
    it places them; else of `model.safetensors`; else of all safetensors. Raises CheckpointError: no safetensors, a file
    that is missing or cannot be read, one tensor in two files."""
    index = _read_index(directory / INDEX_FILE)
    tensors: dict[str, Stored] = {}
    for file in _files(directory, index):
        for stored in _header(file):
            if index.get(stored.name, file.name) != file.name:
                continue
            name = rename(stored.name)
            if name in tensors:
                raise CheckpointError(
                    f"{directory}: {name} is in {tensors[name].file.name} and again in {file.name}; "
                    "remove the files that do not belong to this checkpoint"
                )
            tensors[name] = stored
    return tensors


def shorten(names: Sequence[str]) -> str:
    """The first few, and the number of the others."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor -> file name; empty without an index."""
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is not a valid safetensors index; download it again") from None


def _files(directory: Path, index: dict[str, str]) -> Iterable[Path]:
    if index:
        files = [directory / name for name in sorted(set(index.values()))]
        if missing := [file.name for file in files if not file.exists()]:
            raise CheckpointError(
                f"{directory}: {len(missing)} of the {len(files)} files that {INDEX_FILE} names are missing: "
                f"{shorten(missing)}; download them"
            )
        return files
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory} has no safetensors files, and no others are read; download them, or set --load-format dummy"
        )
    return files


def _header(file: Path) -> list[Stored]:
    try:
        with safe_open(file, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}
            return [Stored(file, name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file ({error}); download it again") from None
