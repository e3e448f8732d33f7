"""Where records come from: JSON files, local folders, and the Hugging Face hub.

JSON is read here; parquet, arrow and the hub by the `datasets` package, an extra. Knows nothing of what a record holds.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mini_engine.bench.datasets.sample import draws
from mini_engine.bench.files import MOST_BYTES
from mini_engine.bench.report import BenchError
from mini_engine.config import ConfigError

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
FORMATS = {".parquet": "parquet", ".arrow": "arrow"}
SHUFFLE_BUFFER = 1_000  # records of a stream that lie in memory to be drawn from
DEFAULT_SPLIT = "train"


def read_json(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON file: a list of objects, or an object on each line.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--dataset-path: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--dataset-path: {path} is no JSON: it is not text in UTF-8") from None
    number = 0  # of the line before the text that is read
    try:
        if text.lstrip().startswith("["):
            records = json.loads(text)
        else:
            records = []
            for number, line in enumerate(text.split("\n")):  # noqa: B007 - told if it breaks off
                if line.strip():
                    records.append(json.loads(line))
    except json.JSONDecodeError as error:
        where = f"line {number + error.lineno} column {error.colno}: {error.msg}"
        raise ConfigError(
            f"--dataset-path: {path} is neither a JSON list nor an object on each line: {where}"
        ) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or as many levels
        raise ConfigError(f"--dataset-path: {path} holds JSON that cannot be read, near line {number + 1}") from None
    if not all(isinstance(record, dict) for record in records):
        raise ConfigError(f"--dataset-path: {path} has records that are no JSON objects")
    return list(records)


def shuffled(records: Iterable[dict[str, Any]], seed: int | None) -> Iterable[dict[str, Any]]:
    """In an order drawn from `seed`, of a stream by a window that moves along it; None leaves it as it is."""
    if seed is None:
        return records
    if isinstance(records, list):
        return draws(seed, "records").sample(records, len(records))
    return _drawn(records, draws(seed, "records"))


def _drawn(records: Iterable[dict[str, Any]], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Not by `datasets`, whose shuffled streams sleep for five seconds."""
    window: list[dict[str, Any]] = []
    for record in records:
        if len(window) < SHUFFLE_BUFFER:
            window.append(record)
            continue
        place = rng.randrange(SHUFFLE_BUFFER)
        yield window[place]
        window[place] = record
    rng.shuffle(window)
    yield from window


def hf_records(path: str, subset: str | None, split: str | None, seed: int | None) -> Iterable[dict[str, Any]]:
    """The records of a local file or folder, or of a data set on the hub, where it may have subsets; shuffled by
    `seed` unless it is None.

    Raises:
        ConfigError: there is no such split or nothing to read, or the `datasets` package is missing.
        BenchError: the hub does not answer or has no such data set.
    """
    place = Path(path)
    if len(os.fsencode(place.name)) > MOST_BYTES:
        raise ConfigError(f"--dataset-path: a name has at most {MOST_BYTES} bytes, and {place.name[:20]}... has more")
    files = _files(place)
    if subset is not None and place.exists():
        raise ConfigError(f"--hf-subset: {path} is here and not on the hub: give --dataset-path the subset's folder")
    if files and all(file.suffix in JSON_SUFFIXES for file in files):
        chosen = _of_split(place, files, split)
        return shuffled([record for file in chosen for record in read_json(file)], seed)
    if place.exists() and not files:
        raise ConfigError(f"--dataset-path: {path} has no file ending in {', '.join([*JSON_SUFFIXES, *FORMATS])}")
    return _with_datasets(path, files, subset, split, seed)


def _files(place: Path) -> list[Path]:
    found = [place] if place.is_file() else sorted(place.rglob("*"))
    tables = [file for file in found if file.suffix in FORMATS]
    # Beside tables, JSON files describe them.
    return tables or [file for file in found if file.suffix in JSON_SUFFIXES]


def _of_split(place: Path, files: list[Path], split: str | None) -> list[Path]:
    """The files whose name, or a folder's below `place`, begins with the split's; if there is none, all are `train`."""

    def names(file: Path) -> tuple[str, ...]:
        return (file.name, *file.relative_to(place).parts)

    named = [file for file in files if any(name.startswith(split or DEFAULT_SPLIT) for name in names(file))]
    if named:
        return named
    if split in (None, DEFAULT_SPLIT):
        return files
    raise ConfigError(f"--hf-split: no file's name begins with {split!r}: {', '.join(file.name for file in files[:5])}")


def _with_datasets(
    path: str, files: list[Path], subset: str | None, split: str | None, seed: int | None
) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"--dataset-path: {path} is read by the package `datasets`: pip install 'mini-engine[hf]', "
            "or give a JSON file"
        ) from None
    try:
        if files:
            chosen = [str(file) for file in _of_split(Path(path), files, split)]
            stream = datasets.load_dataset(FORMATS[files[0].suffix], data_files=chosen, split="train", streaming=True)
        else:
            stream = datasets.load_dataset(path, subset, split=split or DEFAULT_SPLIT, streaming=True)
        records = iter(shuffled(stream.decode(False), seed))  # media as the bytes they are
        return itertools.chain([next(records)], records)
    except (OSError, ValueError, RuntimeError, StopIteration) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise BenchError(
            f"hf: {path} cannot be loaded: {why}. Without the network, give --dataset-path a local copy: a file or "
            "folder of JSON, parquet or arrow"
        ) from None
