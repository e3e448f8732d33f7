"""What every regime reports: percentiles, a table for people, and the JSON object with versions and hardware."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("mini-engine", "torch", "transformers", "pyzmq", "msgspec", "av")


class BenchError(RuntimeError):
    """What is measured did not do its part, so there is no result; the text says who and how."""


@dataclasses.dataclass
class Report:
    """What a regime found. `figures` must be plain JSON data; `failures` are sentences, and make the exit status 1."""

    figures: dict[str, Any]
    failures: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Summary of some durations, in milliseconds; the percentiles are None when there are none."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latencies:
        """From durations in seconds, in any order."""
        if not seconds:
            return cls(0, None, None, None)
        return cls(len(seconds), *(round(1000 * percentile(seconds, share), 3) for share in (0.5, 0.9, 0.99)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, by linear interpolation between the two nearest; the
    same as `numpy.percentile(values, 100 * share)`.

    Raises:
        ValueError: no values, or a share outside of [0, 1].
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"no {share} percentile of {len(values)} values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lines of right-aligned columns, the first one left-aligned. Floats get three decimals, None a dash."""
    cells = [[str(name) for name in head], *([_cell(value) for value in row] for row in rows)]
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


def as_json(config: dict[str, Any], report: Report) -> dict[str, Any]:
    """The object of the last line: what was asked for, on what it ran, what came out."""
    return {
        "regime": config.get("regime"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": plain(config),
        "versions": versions(),
        "hardware": hardware(),
        "figures": report.figures,
        "failures": report.failures,
    }


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON can hold it: paths, infinity, and keys that are no texts, as texts."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        text = isinstance(value, Path) or value == math.inf
        found[str(key)] = str(value) if text else plain(value) if isinstance(value, dict) else value
    return found


def versions() -> dict[str, str]:
    """Python's version and those of the packages that matter to speed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def hardware() -> dict[str, Any]:
    """The machine. The load average tells a reader whether the figures had it to themselves."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 20), 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
