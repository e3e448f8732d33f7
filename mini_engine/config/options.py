"""What an option is: its type, default, help, group, limits and parser; and the words that describe it."""

import ast
import dataclasses
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

ENV_PREFIX = "MINI_ENGINE_"
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
TYPE_NAMES |= {list: "a list of strings", dict: "a JSON object"}


class ConfigError(ValueError):
    """Settings that cannot be used: for each a line that names the flag, the value and the remedy."""


def flag_of(name: str) -> str:
    """The flag that sets a field: its name as a command line writes it."""
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """An option of the server: a field of the configuration with what the command line and the docs say about it."""

    name: str
    type: Any  # `int` for `int | None`
    help: str
    group: str
    default: Any
    unset: str | None = None  # the meaning of the default, where its value does not say it
    short: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    parse_text: Callable[[str], Any] | None = None  # where its type does not say how; raises ValueError
    metavar: str | None = None
    positional: bool = False
    remedy: str | None = None  # for a value that it does not take
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
        """The values it takes, in words, such as `an integer from 0 to 65535`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        low, high = number_text(self.minimum), number_text(self.maximum)
        bounds = f" from {low} to {high}" if self.maximum is not None else f" of at least {low}"
        return TYPE_NAMES[self.base] + (bounds if self.minimum is not None else "")

    @property
    def default_text(self) -> str:
        """The default in words; where it is None or empty, the meaning of that."""
        if self.unset is not None:
            return self.unset
        return {True: "on", False: "off"}[self.default] if self.type is bool else number_text(self.default)

    def read(self, value: Any, source: str, errors: list[str]) -> Any:
        """The value as the field has it, from a text of a flag or variable, or from a value of a YAML file. Where it is
        not of the field's type, out of its limits, or empty, as is a variable for which there was no value: None, and
        a line in `errors` with its `source`."""
        if value == "" and self.default != "":
            errors.append(f"{source}: empty; leave it out for the default")
            return None
        parsers: dict[Any, Callable[[str], Any]] = {int: parse_count, dict: json.loads, list: parse_list}
        parse = self.parse_text or parsers.get(self.base, str)
        number = self.base in (int, float)
        kind = Annotated[self.type, msgspec.Meta(ge=self.minimum, le=self.maximum)] if number else self.type
        try:
            parsed = parse(value) if isinstance(value, str) else value
            return None if parsed is None and self.base is not dict else msgspec.convert(parsed, kind, strict=False)
        except ValueError:
            remedy = f"; {self.remedy}" if self.remedy else ""
            errors.append(f"{source}: {'what is given' if self.secret else repr(value)} is not {self.values}{remedy}")
            return None


def options_of(group: str) -> Callable[..., Any]:
    """What makes the dataclass fields of a group's options: `(default, ...)`, the rest as fields of `Setting`."""

    def option(default: Any, **more: Any) -> Any:
        metadata = {"group": group, "default": default, **more}
        if isinstance(default, (list, dict)):
            return dataclasses.field(default_factory=default.copy, metadata=metadata)
        return dataclasses.field(default=default, metadata=metadata)

    return option


def settings_of(options: type) -> list[Setting]:
    """The settings of a dataclass whose fields `options_of` has made. The help of each is the text below it."""
    types = get_type_hints(options)
    source = inspect.getsource(sys.modules[options.__module__])  # to find the class in it takes inspect 20 ms
    definition: Any = next(part for part in ast.parse(source).body if getattr(part, "name", "") == options.__name__)
    pairs = itertools.pairwise(definition.body)
    helps = {ast.unparse(field.target): text.value.value for field, text in pairs if isinstance(field, ast.AnnAssign)}
    settings = []
    for field in dataclasses.fields(options):
        args = get_args(types[field.name])
        kind = args[0] if type(None) in args else types[field.name]
        settings.append(Setting(name=field.name, type=kind, help=" ".join(helps[field.name].split()), **field.metadata))
    return settings


def parse_count(text: str) -> int:
    """`16384`, `16k` (16,000), `16K` (16,384), `1.5G`: small letters are powers of 1000, capitals of 1024, as in vLLM.
    Raises ValueError: not an integer, or not a number with one of these letters."""
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
