"""What a result may say of the command line that made it: all but the keys in it."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from pathlib import Path
from typing import Any

from mini_engine.bench.parser import split_flags
from mini_engine.config import fields, flag_of

HIDDEN = "HIDDEN"
TEXTS_OF_FLAGS = ("launch", "a", "b")  # by name, the flags whose value is itself a text of flags of serve.py
FLAG = re.compile("--?[a-zA-Z]")  # how one begins, unlike a number below 0


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags by name, as JSON can hold them. Values of `--header`, of which any may be a key, and those of secret
    flags of servers to be started are hidden.
    """
    found = dict(vars(args))
    for name in TEXTS_OF_FLAGS:
        if found.get(name):
            found[name] = without_secrets(found[name])
    if found.get("header"):
        found["header"] = [(name, HIDDEN) for name, _ in found["header"]]
    return {name: _plain(value) for name, value in found.items()}


def without_secrets(text: str) -> str:
    """A text of flags of serve.py, the values of secret ones hidden."""
    secret = {flag_of(field.name) for field in fields() if field.metadata["option"].secret}
    words = split_flags("flags", text)
    shown: list[str] = []
    hide = False  # the values of the last flag, which may have several
    for word in words:
        name, equals, _ = word.partition("=")
        if FLAG.match(word):
            hide = name.replace("_", "-") in secret
            shown.append(f"{name}={HIDDEN}" if hide and equals else word)
        else:
            shown.append(HIDDEN if hide else word)
    return text if shown == words else shlex.join(shown)


def _plain(value: Any) -> Any:
    """Paths, infinity, and keys that are no texts, as texts."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) or value == math.inf else value
