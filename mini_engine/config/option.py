"""What an option is: a dataclass field that carries its help, group, limits and reader."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args


class ConfigError(ValueError):
    """A setting that cannot be used. The text names the flag, the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class Option:
    """What the command line and the docs need to know about a field beside its type and default."""

    help: str
    group: str
    short: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    positional: bool = False
    bare: str | None = None  # the value of the flag alone; None: it needs one


def option(default: Any, help: str, group: str, **more: Any) -> Any:
    """A dataclass field with an `Option` in its metadata."""
    metadata = {"option": Option(help=help, group=group, **more)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: default.copy(), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_bytes(text: str) -> int:
    """`512M`, `4G`, `1.5GiB`, `1000` -> bytes; the letters are powers of 1024.

    Raises:
        ValueError: not a number with one of these units.
    """
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    stripped = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = stripped[-1:] if stripped[-1:].isalpha() else ""
    if unit not in units:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with K, M, G or T, such as 512M")
    try:
        value = float(stripped.removesuffix(unit))
    except ValueError:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with K, M, G or T, such as 512M") from None
    return int(value * units[unit])


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object from the command line.

    Raises:
        ValueError: not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f'{text!r} is not a JSON object such as {{"video": 1}}')
    return value


def flag_of(name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def check_range(field: dataclasses.Field[Any], kind: Any, value: Any) -> None:
    """Raises ConfigError when `value` is outside the limits or choices of a field of the type `kind`."""
    opt: Option = field.metadata["option"]
    choices = get_args(kind) if isinstance(value, str) else ()
    if choices and all(isinstance(choice, str) for choice in choices) and value not in choices:
        raise ConfigError(f"{flag_of(field.name)}: {value!r} is not one of {', '.join(choices)}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not (math.isfinite(value) and abs(value) < 2**63):
            raise ConfigError(f"{flag_of(field.name)}: {value} is not a number below 2**63")
        if opt.minimum is not None and value < opt.minimum:
            raise ConfigError(f"{flag_of(field.name)}: {value} is below the least value, {opt.minimum}")
        if opt.maximum is not None and value > opt.maximum:
            raise ConfigError(f"{flag_of(field.name)}: {value} is above the greatest value, {opt.maximum}")


def check_files(paths: Mapping[str, str | None]) -> None:
    """Raises ConfigError for the first flag whose path is no file; None is no path."""
    for flag, path in paths.items():
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{flag}: {path} is not a file")
