"""A command line whose errors are one line each: for a flag that is none, the nearest that is one; and values that
several regimes read.

Knows nothing of regimes; which flags of other programs are refused, and why, is given to it.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from mini_engine.config import ConfigError
from mini_engine.config.sources import suggestion


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit. `commands` are the parsers below it."""

    commands: Mapping[str, Parser]

    def error(self, message: str) -> NoReturn:
        """One sentence, beginning with the flag."""
        raise ConfigError(message.removeprefix("argument "))

    @property
    def flags(self) -> list[str]:
        """All that it takes."""
        return [flag for action in self._actions for flag in action.option_strings]

    def check_flags(self, argv: Sequence[str], refused: Mapping[str, str]) -> None:
        """Raises ConfigError for the first argument that looks like a flag and is none of this parser's, with the
        reason if it is a `refused` one.
        """
        for arg in argv:
            flag = arg.partition("=")[0]
            if not flag.startswith("--") or flag in self.flags:
                continue
            if flag in refused:
                raise ConfigError(f"{flag} is a flag of vLLM's `bench serve` that is not here: {refused[flag]}")
            raise ConfigError(
                f"unknown flag {flag}{suggestion(flag, self.flags, '--') or f'; {self.prog} --help lists them'}"
            )


def real(text: str) -> float:
    """A number; here and below, what is none raises an error that says so."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def at_least(least: int, most: float = math.inf, why: str = "") -> Callable[[str], int]:
    """Reads a whole number that is not below `least`, and, for what is made in memory, not above `most`, and `why`."""

    def number(text: str) -> int:
        if whole(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        if whole(text) > most:
            raise argparse.ArgumentTypeError(f"{text} is above {most}{why and ': ' + why}")
        return whole(text)

    return number


def split_flags(name: str, text: str) -> list[str]:
    """The words of a text of flags, as a shell splits them.

    Raises:
        ConfigError: a quote is not closed; `name` is where the text stands.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{name}: these flags cannot be read: {error}") from None
