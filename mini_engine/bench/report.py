"""What every command of bench.py prints and returns: tables, and the JSON object with versions and hardware."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("mini-engine", "torch", "transformers", "pyzmq", "msgspec", "av")


class BenchError(RuntimeError):
    """There is no result; the text says why."""


@dataclasses.dataclass
class Report:
    """What a command measured. `figures` is plain JSON data; `failures` are sentences, and make the exit status 1."""

    figures: dict[str, Any]
    failures: list[str] = dataclasses.field(default_factory=list)
    all_here: bool = True  # False: the server ran before, and may be on another machine


def say(text: str) -> None:
    """A line on stderr."""
    print(f"bench.py: {text}", file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lines of right-aligned columns, the first one left-aligned. Floats get three decimals, None a dash."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def as_json(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """The object of the last line: what was asked for, what it ran on, what was measured."""
    return {
        "regime": args.regime,
        "date": now(),
        "config": config_of(args),
        **surroundings(report.all_here),
        "figures": report.figures,
        "failures": report.failures,
    }


def now() -> str:
    """Date and time in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags by name, as JSON can hold them: infinity, paths and tuples as keys become texts."""
    return {name: _plain(value) for name, value in vars(args).items() if name != "command"}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): one for key, one in value.items()}
    return str(value) if isinstance(value, Path) or value == math.inf else value


def surroundings(all_here: bool) -> dict[str, Any]:
    """What it ran on: of `all` that was measured, or of the `client` alone."""
    return {
        "surroundings_of": "all" if all_here else "client",
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "hardware": _hardware(),
    }


def _commit() -> str | None:
    """The commit of this checkout, with `-dirty` if its files differ from it; None where git knows of none."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _hardware() -> dict[str, Any]:
    """The machine. The load average tells a reader whether the measurements had it to themselves."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    # By what the driver says, since torch is not imported here.
    cards = [card.read_text().splitlines()[0] for card in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "gpus": [card.partition(":")[2].strip() for card in cards],
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
