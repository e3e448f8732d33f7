"""The safetensors files of a model directory: which file holds which tensor, and where.

Knows nothing of models: a given mapping converts names. The format: eight bytes with the length of a header in JSON,
the header, and the tensors' bytes (https://huggingface.co/docs/safetensors).
"""

import json
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = FLOATS | {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
# An error that lists thousands of names hides its own message.
MAX_LISTED = 8
MAX_HEADER_BYTES = 100_000_000  # by the format
PROGRESS_SECONDS = 5.0  # between two lines of progress
PROGRESS_LINES = 8  # over which the rate is taken: matrices end in bursts, and other programs take turns


class CheckpointError(ValueError):
    """Weights that cannot be used. The text names the directory or file, what is wrong with it, and the remedy."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint. `dtype` is safetensors' name, such as "BF16"; `offset`, in bytes, is in the file.
    `columns`: which columns of a matrix at `offset` are the rows of this tensor, and how many that matrix has; None: it
    is the tensor that is there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    columns: tuple[slice, int] | None = None


class Progress:
    """Logs from time to time how many of `total` bytes are done, and at the end how long it took. Thread-safe."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._begun = time.monotonic()
        self._lines = deque([(self._begun, 0)], maxlen=PROGRESS_LINES)  # when the last were logged, and what was done
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """So many more bytes are done."""
        with self._lock:
            self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        seconds, total = now - self._begun, self._total / 1e9
        if self._done == self._total:
            logger.info("%s: %.2f GB in %.1f s", self._what, total, seconds)
        elif now - self._lines[-1][0] >= PROGRESS_SECONDS:
            # Not at the rate since the start: files are read faster as long as the page cache has them.
            since, before = self._lines[0]
            left = (self._total - self._done) * (now - since) / max(1, self._done - before)
            self._lines.append((now, self._done))
            logger.info("%s: %.2f of %.2f GB, about %.0f s left", self._what, self._done / 1e9, total, left)


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
        if not file.is_file():  # to open a pipe would wait for another process
            raise ValueError("it is not a regular file")
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            start = 8 + int.from_bytes(opened.read(8), "little")
            if start > min(size, MAX_HEADER_BYTES):
                raise ValueError(f"it has {size} bytes, its header {start}")
            header: dict[str, dict[str, Any]] = json.loads(opened.read(start - 8))
        header.pop("__metadata__", None)
        end, tensors = start, []
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            tensors.append(Stored(file, name, tuple(entry["shape"]), entry["dtype"], end))
            num_bits = math.prod(tensors[-1].shape) * _bits(entry["dtype"])
            if entry["data_offsets"] != [end - start, end - start + num_bits // 8]:
                raise ValueError(f"the bytes of {name} do not fit its shape, or do not follow those before them")
            end += num_bits // 8
        if end != size:
            raise ValueError(f"it has {size} bytes, its tensors end at {end}")
        return tensors
    except OSError as error:
        raise _unreadable(file, error) from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file ({error}); download it again") from None


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file} cannot be read ({error.strerror}); check its permissions and its disk")


def _bits(dtype: str) -> int:
    """Bits of a value, by the dtype's name, such as "BF16", "F8_E4M3" or "BOOL"."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def read_tensor(stored: Stored, rows: slice | None = None, into: Tensor | None = None) -> Tensor:
    """Some rows of a tensor, by default all; one without axes has one row. `into`: contiguous memory on the CPU, of
    their shape and dtype, to read them to. Not through a mapping of the file: its page faults cost more than a copy
    does, and the kernel reads ahead less. Raises CheckpointError: the file cannot be read, or has become shorter."""
    shape, dtype = stored.shape or (1,), DTYPES[stored.dtype]
    rows = rows or slice(0, shape[0])
    if stored.columns is not None:
        columns, width = stored.columns
        whole = read_tensor(replace(stored, shape=(shape[1], width), columns=None))
        part = whole[:, columns][:, rows].T
        return part if into is None else into.copy_(part)
    tensor = torch.empty(rows.stop - rows.start, *shape[1:], dtype=dtype) if into is None else into
    offset = stored.offset + rows.start * math.prod(shape[1:]) * dtype.itemsize
    target = tensor.view(-1).view(torch.uint8).numpy().data
    try:
        with FileIO(stored.file) as file:
            while target:
                count = os.preadv(file.fileno(), [target], offset)
                if not count:
                    raise CheckpointError(f"{stored.file} has become shorter while it was read; download it again")
                offset, target = offset + count, target[count:]
    except OSError as error:
        raise _unreadable(stored.file, error) from None
    return tensor
