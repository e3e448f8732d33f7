"""Pictures: a run's latencies, throughput over time and stages; a sweep's throughput, latencies and memory; curves."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.client import Run
from benchmarks.metrics import arrived, in_flight, latencies
from mini_engine.config import ConfigError

try:
    from matplotlib.figure import Figure  # by itself it needs no display
    from matplotlib.ticker import LogFormatter
except ImportError:
    raise ConfigError("--plot needs the package matplotlib: pip install 'mini-engine[bench]'") from None

INCHES = (15.0, 7.2)
NAMES_CHARACTERS = 32  # that fit side by side below a panel
SWEEP_PANELS = {  # by unit: curves and their keys in the results
    "requests / s": {"throughput": "request_throughput"},
    "ms": {"TTFT p50": "median_ttft_ms", "TTFT p99": "p99_ttft_ms", "E2EL p50": "median_e2el_ms"},
    "MB": {"memory at start": "start_memory_mb", "peak memory": "peak_memory_mb"},
}
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
    """The picture of a sweep: what was measured of throughput, latencies and memory over the flag's values."""
    panels = {}
    for unit, keys in SWEEP_PANELS.items():
        curves = {label: [run.get(key) for run in runs] for label, key in keys.items()}
        panels[unit] = {label: numbers for label, numbers in curves.items() if set(numbers) != {None}}
    panels = {unit: curves for unit, curves in panels.items() if curves}
    figure = Figure((4 * len(panels), 3.6), layout="constrained")
    for axis, (unit, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for label, numbers in curves.items():
            axis.plot(values, np.array(numbers, float), marker="o", label=label)
        axis.set(xlabel=flag, ylabel=unit)
        if unit == "ms":
            axis.set_yscale("log")
            axis.yaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter())  # 40 and not 4 x 10^1
        else:
            axis.set_ylim(0, None)
        axis.legend()
        if sum(map(len, values)) > NAMES_CHARACTERS:
            axis.set_xticks(range(len(values)), values, rotation=20, ha="right")
    figure.savefig(path)
    if path.suffix == ".png":  # few colours make it a third as large
        Image.open(path).convert("RGB").quantize().save(path)
