"""The safetensors files of a model directory: which tensors lie where, and reading parts of them.

Knows nothing of models: a given mapping converts names. Imports torch only to read, so that a process
that holds no tensors may ask whether a checkpoint is whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# An error that lists thousands of names hides its own message.
MAX_LISTED = 8
# What was read of a mapped file stays in this process's resident memory until it is unmapped: at most so much of it.
MAPPED_BYTES = 64 << 20


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
    """Every tensor of the checkpoint by its name after `rename`. Reads headers only.

    With an index, its files and what it says to be in each; else `model.safetensors`; else all safetensors there are.
    Raises CheckpointError: no safetensors, a file that is missing or cannot be read, one tensor in two files.
    """
    index = _read_index(directory / INDEX_FILE)
    found: dict[str, Stored] = {}
    for file in _files(directory, index):
        for stored in _header(file):
            if index.get(stored.name, file.name) != file.name:
                continue
            name = rename(stored.name)
            if name in found:
                raise CheckpointError(
                    f"{directory}: {name} is in {found[name].file.name} and again in {file.name}; "
                    "remove the files that do not belong to this checkpoint"
                )
            found[name] = stored
    return found


def shorten(names: Sequence[str]) -> str:
    """The first few, and the number of the others."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


class Reader:
    """Reads parts of stored tensors, best in the order of the files: one is open at a time. Use it in a `with`."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._handle: Any = None
        self._mapped = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        """Unmaps the open file."""
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._file, self._handle, self._mapped = None, None, 0

    def read(self, stored: Stored, index: tuple[slice, ...]) -> Tensor:
        """The part `index` of the leading axes: a view of the mapped file, to be dropped before the next call."""
        if stored.file != self._file:
            self._open(stored.file)
        part: Tensor = self._handle.get_slice(stored.name)[index]
        # Of whole rows, since pages hold more than a few columns. None of it is in memory before it is used.
        nbytes = len(part) * math.prod(stored.shape[1:]) * part.element_size()
        if self._mapped + nbytes > MAPPED_BYTES and self._mapped:
            self._open(stored.file)
            part = self._handle.get_slice(stored.name)[index]
        self._mapped += nbytes
        return part

    def _open(self, file: Path) -> None:
        self.__exit__()
        self._file, self._handle = file, safe_open(file, framework="pt").__enter__()


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
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(
                f"{directory}: {len(missing)} of the {len(files)} files that {INDEX_FILE} names are missing: "
                f"{shorten(missing)}; download them"
            )
        return files
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
        if pickled:
            raise CheckpointError(
                f"{directory} has its weights in {shorten(pickled)} only, and unpickling can run any code; "
                "convert them to safetensors"
            )
        raise CheckpointError(
            f"{directory} has no safetensors files, and no others are read; download them, or set --load-format dummy"
        )
    return files


def _header(file: Path) -> list[Stored]:
    if not file.is_file():  # opening a pipe would wait for a writer
        raise CheckpointError(f"{file} is not a regular file, or a broken link; download it again")
    try:
        # Not for torch: neither is it imported for this, nor is a tensor made.
        with safe_open(file, framework="np") as handle:
            return [
                Stored(file, name, tuple(stored.get_shape()), stored.get_dtype())
                for name in handle.keys()
                for stored in (handle.get_slice(name),)
            ]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is cut short or no safetensors file ({error}); download it again") from None
