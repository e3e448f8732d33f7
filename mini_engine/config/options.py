"""What an option is: a dataclass field with its help, group, limits and parser; and the words that describe it."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

Options = TypeVar("Options", bound=msgspec.Struct)
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

TYPE_NAMES = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list of strings",
    dict: "a JSON object",
}  # fmt: skip
ENV_PREFIX = "MINI_ENGINE_"


class ConfigError(ValueError):
    """A setting that cannot be used. The text names the flag, the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class Option:
    """What the command line and the docs need to know about a field beside its type and default."""

    help: str
    group: str
    unset: str | None = None  # what the default stands for, where its value does not say it
    short: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    parse: Callable[[str], Any] | None = None  # from text, where its type does not say how; raises ValueError
    metavar: str | None = None
    positional: bool = False
    bare: str | None = None  # the value of the flag alone; None: it needs one
    twins: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other flags, and the value each stands for
    secret: bool = False  # never printed


def options_of(group: str) -> Callable[..., Any]:
    """What makes the dataclass fields of a group's options: `(default, help, ...)`, the rest as fields of `Option`."""

    def option(default: Any, help: str, **more: Any) -> Any:
        metadata = {"option": Option(help=help, group=group, **more)}
        if isinstance(default, (list, dict)):
            return dataclasses.field(default_factory=lambda: default.copy(), metadata=metadata)
        return dataclasses.field(default=default, metadata=metadata)

    return option


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


def flag_of(name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def plain_type(kind: Any) -> Any:
    """`int` for `int | None`; any other type as it is."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(arg for arg in get_args(kind) if arg is not type(None))
    return kind


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of the configuration with its option."""

    name: str
    type: Any  # `int` for `int | None`
    default: Any  # where it is no list or object
    opt: Option

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
        """All ways to write its flag, its twins last."""
        no = [f"--no-{self.flag[2:]}"] if self.type is bool else []
        return [self.flag, *no, *([self.opt.short] if self.opt.short else []), *self.opt.twins]

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
        low, high = number_text(self.opt.minimum), number_text(self.opt.maximum)
        bounds = f" from {low} to {high}" if self.opt.maximum is not None else f" of at least {low}"
        return TYPE_NAMES[self.base] + (bounds if self.opt.minimum is not None else "")

    @property
    def default_text(self) -> str:
        """The default in words; where it is nothing, what that stands for."""
        if self.opt.unset is not None:
            return self.opt.unset
        return {True: "on", False: "off"}[self.default] if self.type is bool else number_text(self.default)

    def parse(self, text: str) -> Any:
        """The value from a text, which msgspec is still to check and convert. Raises ValueError."""
        parsers: dict[Any, Callable[[str], Any]] = {int: parse_count, dict: json.loads}
        return (self.opt.parse or parsers.get(self.base, str))(text)


def number_text(value: Any) -> str:
    """`256M` for 268435456, as `parse_count` reads it; small and odd numbers in full."""
    for shift, unit in ((30, "G"), (20, "M")):
        if isinstance(value, int) and value and value % (1 << shift) == 0:
            return f"{value >> shift}{unit}"
    return str(value)


def parse_options(owner: str, given: Mapping[str, Any], kind: type[Options]) -> Options:
    """The options `given` to `owner`, as JSON values; null is as good as none. Raises ValueError, whose text is safe
    for a client."""
    try:
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{owner}: {error}; it takes {', '.join(kind.__struct_fields__)}") from None
