"""What every regime reports: percentiles, a table for people, and the JSON object with versions and hardware."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GPUS = Path("/proc/driver/nvidia/gpus")
PACKAGES = ("mini-engine", "torch", "transformers", "pyzmq", "msgspec", "av")


class BenchError(RuntimeError):
    """What is measured did not do its part, so there is no result; the text says who and how."""


@dataclasses.dataclass
class Report:
    """What a regime found. `figures` must be plain JSON data; `failures` are sentences, and make the exit status 1, or
    that of an interrupt where Ctrl-C has cut it short. `files` write what else was asked for, and return where it is;
    they are called when the figures have been told.
    """

    figures: dict[str, Any]
    failures: list[str] = dataclasses.field(default_factory=list)
    files: list[Callable[[], Sequence[Path]]] = dataclasses.field(default_factory=list)
    all_here: bool = True  # what was measured ran on this machine, with these packages
    interrupted: bool = False  # this is what was finished by then


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
    """The object of the last line: what was asked for, as JSON data; on what it ran; what came out."""
    return {
        "regime": config.get("regime"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": config,
        **surroundings(report.all_here),
        "figures": report.figures,
        "failures": report.failures,
    }


def surroundings(all_here: bool) -> dict[str, Any]:
    """On what it ran. `surroundings_of` says whose these are: of `all` that was measured, or of the `client` alone,
    whose server was there before it.
    """
    return {
        "surroundings_of": "all" if all_here else "client",
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
    }


def commit(root: Path = ROOT) -> str | None:
    """The commit of this project, with `-dirty` if its files differ from it; None if it is no checkout of git."""
    if not (root / ".git").exists():  # of a folder above it is another project's
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


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
        "gpus": gpus(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def gpus() -> list[str]:
    """Names of the GPUs that NVIDIA's driver sees, by what it tells in /proc: torch may not be loaded here."""
    lines = [line for card in sorted(GPUS.glob("*/information")) for line in _lines(card)]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def say(text: str, who: str = "bench.py") -> None:
    """A line on stderr, if there is one."""
    if sys.stderr is not None:
        print(f"{who}: {text}", file=sys.stderr, flush=True)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
