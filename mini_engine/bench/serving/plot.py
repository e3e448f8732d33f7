"""Pictures of a run: latency distributions, throughput over time, and the server's stages."""

from __future__ import annotations

import contextlib
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no display is needed

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mini_engine.bench.serving.figures import arrived, latencies, under_way
from mini_engine.bench.serving.measure import Measured
from mini_engine.bench.serving.table import TITLES
from mini_engine.config import ConfigError

COLUMN_INCHES, ROW_INCHES = 5.0, 3.6
BINS = 40
LEAST_PARTS = 20  # of a run, in each of which throughput is counted; of a long one each is a second at most


def check(path: Path) -> None:
    """Raises ConfigError if the ending of `path` names no format of pictures."""
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ConfigError(f"--plot: {path.name} has none of the endings .{', .'.join(sorted(known))}")


def draw(figure: Figure, path: Path) -> list[Path]:
    """Write a picture; the ending of `path` says in which format. Returns the path."""
    figure.savefig(path)
    return [path]


def of_run(measured: Measured) -> Figure:
    """The picture of one run."""
    figure = Figure((3 * COLUMN_INCHES, 2 * ROW_INCHES), layout="constrained")
    axes = figure.subplots(2, 3)
    done = [outcome for outcome in measured.run.outcomes if outcome.ok]
    for (metric, seconds), axis in zip(latencies(done).items(), axes.flat, strict=False):
        _distribution(axis, TITLES[metric][1], [1000 * value for value in seconds])
    _throughput(axes.flat[4], measured)
    _stages(axes.flat[5], measured.figures["stages_ms"])
    return figure


def of_sweep(figures: dict[str, Any]) -> Figure:
    """The picture of a sweep: throughput and latencies over the flag's values, each with a place of its own on the axis
    if one of them is no finite number.
    """
    figure = Figure((2 * COLUMN_INCHES, ROW_INCHES), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = figures["runs"]
    values: list[Any] = figures["values"]
    with contextlib.suppress(ValueError):  # which are names
        numbers = [float(value) for value in values]
        values = numbers if all(map(math.isfinite, numbers)) else values
    left.plot(values, [run["request_throughput"] for run in runs], marker="o")
    left.set(title="Throughput", xlabel=figures["flag"], ylabel="requests / s")
    left.set_ylim(bottom=0)
    for key, (short, _) in TITLES.items():
        if all(run.get(f"median_{key}_ms") is not None for run in runs):
            right.plot(values, [run[f"median_{key}_ms"] for run in runs], marker="o", label=f"{short}, median")
    right.set(title="Latencies", xlabel=figures["flag"], ylabel="ms")
    right.set_ylim(bottom=0)
    right.legend()
    return figure


def _distribution(axis: Axes, title: str, values: list[float]) -> None:
    axis.set(title=title, xlabel="ms", ylabel="count")
    if values:
        axis.hist(values, BINS)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        median = statistics.median(values)
        axis.axvline(median, color="black", linestyle="--", label=f"median {median:.1f}")
        axis.legend()


def _throughput(axis: Axes, measured: Measured) -> None:
    """Tokens a second, and how many requests were under way."""
    axis.set(title="Throughput over time", xlabel="s", ylabel="tokens / s")
    run = measured.run
    parts = max(LEAST_PARTS, math.ceil(run.seconds))
    width = max(run.seconds, 1e-9) / parts
    rates = [0.0] * parts
    for moment, tokens in arrived(run):
        rates[min(int((moment - run.begun) / width), parts - 1)] += tokens / width
    axis.stairs(rates, [width * part for part in range(parts + 1)])
    axis.set_ylim(bottom=0)
    moments, counts = zip(*under_way(run.outcomes), strict=True)
    other = axis.twinx()
    other.step([moment - run.begun for moment in moments], counts, where="post", color="grey", linewidth=0.8)
    other.set_ylabel("requests under way", color="grey")


def _stages(axis: Axes, stages: dict[str, Any] | None) -> None:
    axis.set(title="Where the server says the time went", xlabel="ms, mean")
    if stages is None:
        axis.text(0.5, 0.5, "the server does not say", ha="center", transform=axis.transAxes)
        return
    names = list(stages)
    axis.barh(names, [stages[name]["mean"] for name in names])
    axis.invert_yaxis()
