"""What every command of bench.py prints and returns: tables, and the JSON object with versions and hardware."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "av")


class BenchError(RuntimeError):
    """There is no result; the text says why."""


@dataclasses.dataclass
class Report:
    """What a command measured. `results` is plain JSON data; `failures` are sentences, and make the exit status 1."""

    results: dict[str, Any]
    failures: list[str] = dataclasses.field(default_factory=list)
    all_here: bool = True  # False: the server ran before, and may be on another machine


def say(text: str) -> None:
    """A line on stderr."""
    print(f"bench.py: {text}", file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lines of right-aligned columns, the first one left-aligned. Floats get three decimals, None a dash."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def environment(args: argparse.Namespace, all_here: bool) -> dict[str, Any]:
    """The flags, and what it ran on: of `all` that was measured, or of the `client` alone."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    flags = {name: value for name, value in vars(args).items() if name != "command"}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": {name: "inf" if value == math.inf else value for name, value in flags.items()},
        "environment_of": "all" if all_here else "client",
        "commit": commit or None,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version(), **versions},
        "hardware": _hardware(),
    }


def _hardware() -> dict[str, Any]:
    """The machine. The load average tells a reader whether the measurements had it to themselves."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    # By what the driver says, since torch is not imported here.
    cards = [card.read_text().splitlines()[0] for card in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [card.partition(":")[2].strip() for card in cards],
        "load_average": os.getloadavg(),
    }
