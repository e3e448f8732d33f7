"""What an option is: its type, default, help, group, limits and parser; and the words that describe it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from mini_engine.config.decode_limits import flag_of

ENV_PREFIX = "MINI_ENGINE_"
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
TYPE_NAMES = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list of strings",
    dict: "a JSON object",
}  # fmt: skip


class ConfigError(ValueError):
    """A setting that cannot be used. The text names the flag, the value and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """An option of the server: a field of the configuration with what the command line and the docs say about it."""

    name: str = ""
    type: Any = None  # `int` for `int | None`
    default: Any
    help: str
    group: str
    unset: str | None = None  # what the default stands for, where its value does not say it
    short: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    parse_text: Callable[[str], Any] | None = None  # where its type does not say how; raises ValueError
    metavar: str | None = None
    positional: bool = False
    bare: str | None = None  # the value of the flag alone; None: it needs one
    twins: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other flags, and the value each stands for
    secret: bool = False  # never printed

    @property
    def base(self) -> Any:
        """The type without its arguments, such as `list`; `Literal` for a choice."""
        return get_origin(self.type) or self.type

    @property
    def flag(self) -> str:
        """Such as `--max-num-seqs`."""
        return flag_of(self.name)

    @property
    def flags(self) -> list[str]:
        """All forms of its flag, its twins last."""
        no = [f"--no-{self.flag[2:]}"] if self.type is bool else []
        return [self.flag, *no, *([self.short] if self.short else []), *self.twins]

    @property
    def variable(self) -> str:
        """Such as `MINI_ENGINE_MAX_NUM_SEQS`."""
        return ENV_PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a `Literal` type; empty for any other."""
        return get_args(self.type) if self.base is Literal else ()

    @property
    def values(self) -> str:
        """What it takes, in words, such as `an integer from 0 to 65535`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        low, high = number_text(self.minimum), number_text(self.maximum)
        bounds = f" from {low} to {high}" if self.maximum is not None else f" of at least {low}"
        return TYPE_NAMES[self.base] + (bounds if self.minimum is not None else "")

    @property
    def default_text(self) -> str:
        """The default in words; where it is nothing, what that stands for."""
        if self.unset is not None:
            return self.unset
        return {True: "on", False: "off"}[self.default] if self.type is bool else number_text(self.default)

    def read(self, value: Any, origin: str) -> Any:
        """The value as the field has it, from a text of a flag or variable, or from a value of a YAML file.

        Raises:
            ConfigError: it is not of the field's type, or out of its limits. `origin` says what gave it.
        """
        parsers: dict[Any, Callable[[str], Any]] = {int: parse_count, dict: json.loads, list: parse_list}
        parse = self.parse_text or parsers.get(self.base, str)
        number = self.base in (int, float)
        kind = Annotated[self.type, msgspec.Meta(ge=self.minimum, le=self.maximum)] if number else self.type
        try:
            parsed = parse(value) if isinstance(value, str) else value
            return None if parsed is None else msgspec.convert(parsed, kind, strict=False)
        except ValueError:
            raise ConfigError(f"{origin}: {value!r} is not {self.values}") from None


def options_of(group: str) -> Callable[..., Any]:
    """What makes the dataclass fields of a group's options: `(default, help, ...)`, the rest as fields of `Setting`."""

    def option(default: Any, help: str, **more: Any) -> Any:
        metadata = {"setting": Setting(group=group, default=default, help=help, **more)}
        if isinstance(default, (list, dict)):
            return dataclasses.field(default_factory=default.copy, metadata=metadata)
        return dataclasses.field(default=default, metadata=metadata)

    return option


def setting_of(field: dataclasses.Field[Any], kind: Any) -> Setting:
    """The setting of a dataclass field that one of `options_of` has made; `kind` is its type."""
    args = get_args(kind)
    plain = args[0] if type(None) in args else kind
    return dataclasses.replace(field.metadata["setting"], name=field.name, type=plain)


def parse_count(text: str) -> int:
    """`16384`, `16k` (16,000), `16K` (16,384), `1.5G`: small letters are powers of 1000, capitals of 1024, as in vLLM.

    Raises:
        ValueError: not an integer, or not a number with one of these letters.
    """
    try:
        return int(Decimal(text[:-1]) * UNITS[text[-1]]) if text[-1:].isalpha() else int(text)
    except (ArithmeticError, KeyError) as error:
        raise ValueError(str(error)) from None


def parse_length(text: str) -> int | None:
    """A count, or vLLM's `auto` or `-1` for as much as there is: None. Raises ValueError."""
    return None if text in ("auto", "-1") else parse_count(text)


def parse_limits(text: str) -> Any:
    """`{"video": 1, "image": 4}`, or vLLM's older form of it, `video=1,image=4`. Raises ValueError."""
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(name.isidentifier() and count.isdecimal() for name, _, count in pairs):
        return json.loads(text)
    return {name: int(count) for name, _, count in pairs}


def parse_list(text: str) -> list[Any]:
    """`a,b` or `["a", "b"]`. Raises ValueError."""
    return json.loads(text) if text.startswith('["') else [part.strip() for part in text.split(",")]


def number_text(value: Any) -> str:
    """`256M` for 268435456, as `parse_count` reads it; small and odd numbers in full."""
    for shift, unit in ((30, "G"), (20, "M")):
        if isinstance(value, int) and value and value % (1 << shift) == 0:
            return f"{value >> shift}{unit}"
    return str(value)
