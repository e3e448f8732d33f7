"""Pictures: a run's latencies, throughput over time and stages; a sweep's throughput and latencies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from mini_engine.bench.client import Run
from mini_engine.bench.metrics import METRICS, arrived, in_flight, latencies
from mini_engine.config import ConfigError

try:
    from matplotlib.figure import Figure  # by itself it needs no display
except ImportError:
    raise ConfigError("--plot needs the package matplotlib: pip install 'mini-engine[bench]'") from None

INCHES = (15.0, 7.2)
BINS = 40
LEAST_PARTS = 20  # of a run, in each of which throughput is counted; of a long one each is a second at most


def draw_run(run: Run, stages: dict[str, Any] | None, path: Path) -> None:
    """The picture of one run."""
    figure = Figure(INCHES, layout="constrained")
    axes = figure.subplots(2, 3).flat
    values = latencies([outcome for outcome in run.outcomes if outcome.ok])
    for axis, (metric, found) in zip(axes, values.items(), strict=False):
        axis.set(title=metric.upper(), xlabel="ms", ylabel="count")
        axis.hist(found, BINS)
    moments, tokens = arrived(run)
    parts = max(LEAST_PARTS, math.ceil(run.seconds))
    counts, edges = np.histogram(moments, parts, (0, run.seconds), weights=tokens)
    axes[4].stairs(counts * parts / run.seconds, edges)
    axes[4].set(title="Throughput over time", xlabel="s", ylabel="tokens / s", ylim=(0, None))
    other = axes[4].twinx()
    other.step(*in_flight(run), where="post", color="grey", linewidth=0.8)
    other.set_ylabel("requests in flight", color="grey")
    axes[5].set(title="Stages of a request in the server", xlabel="ms, mean")
    if stages is not None:
        axes[5].barh(list(stages), [stage["mean"] for stage in stages.values()])
        axes[5].invert_yaxis()
    figure.savefig(path)


def draw_sweep(flag: str, values: list[str], runs: list[dict[str, Any]], path: Path) -> None:
    """The picture of a sweep: throughput and the latencies' medians over the flag's values, which are names."""
    figure = Figure(INCHES, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(values, [run["request_throughput"] for run in runs], marker="o")
    left.set(title="Throughput", xlabel=flag, ylabel="requests / s", ylim=(0, None))
    for metric in METRICS:
        medians = [run.get(f"median_{metric}_ms") for run in runs]
        if None not in medians:
            right.plot(values, medians, marker="o", label=f"{metric.upper()}, median")
    right.set(title="Latencies", xlabel=flag, ylabel="ms", ylim=(0, None))
    right.legend()
    figure.savefig(path)
