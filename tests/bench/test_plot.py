"""What the pictures show: each title, as much as there is to show, and no point left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from mini_engine.bench.serving import plot
from mini_engine.bench.serving.client import Outcome
from mini_engine.bench.serving.figures import Measures, figures_of
from mini_engine.bench.serving.load import ClientLoad, Run
from mini_engine.bench.serving.measure import Measured
from mini_engine.config import ConfigError


def measured(**more) -> Measured:
    """Six requests of three chunks; `more` are fields of each outcome."""
    outcomes = [
        Outcome(number, begun, begun + 1.5, [begun + 0.5, begun + 1, begun + 1.5], output_tokens=3, **more)
        for number, begun in enumerate(np.arange(6) / 4)
    ]
    run = Run(outcomes, 0.0, 2.75, ClientLoad(0.1, 0, 0))
    return Measured(run, figures_of(run, Measures()), "", [], "model")


def by_title(axes: list[Axes]) -> dict[str, Axes]:
    return {axis.get_title(): axis for axis in axes if axis.get_title()}


def test_the_picture_of_a_run(tmp_path: Path):
    stages = {"fetch": 0.25, "encode": 0.5, "other": 0.125}
    found = measured(stages=stages)
    figure = plot.of_run(found)
    shown = by_title(figure.axes)
    latencies = ["Time to First Token", "Time per Output Token (excl. 1st token)", "Inter-token Latency"]
    latencies.append("End-to-end Latency")
    assert list(shown) == [*latencies, "Throughput over time", "Where the server says the time went"]
    for title, count in zip(latencies, (6, 6, 12, 6), strict=True):
        assert sum(bar.get_height() for bar in shown[title].patches) == count, title
    (steps,) = shown["Throughput over time"].patches
    rates = steps.get_data()
    assert sum(rates.values * np.diff(rates.edges)) == pytest.approx(18), "all tokens"
    assert (rates.edges[0], rates.edges[-1]) == pytest.approx((0, 2.75)), "to the end of the run and no further"
    (under_way,) = (axis for axis in figure.axes if axis.get_ylabel() == "requests under way")
    assert max(under_way.lines[0].get_ydata()) == found.figures["max_concurrent_requests"] > 1
    bars = shown["Where the server says the time went"]
    assert [label.get_text() for label in bars.get_yticklabels()] == list(stages)
    assert [bar.get_width() for bar in bars.patches] == [1000 * seconds for seconds in stages.values()]
    (path,) = plot.draw(figure, tmp_path / "run.svg")
    assert "<svg" in path.read_text()


def test_nothing_to_show():
    assert len(by_title(plot.of_run(measured(error="no")).axes)) == 6
    axis = by_title(plot.of_run(measured()).axes)["Where the server says the time went"]
    assert not axis.patches and axis.texts[0].get_text() == "the server does not say"


@pytest.mark.parametrize(
    ("values", "places"), [(["1", "2", "8"], [1, 2, 8]), (["1", "2", "inf"], [0, 1, 2]), (["lru", "shm"], [0, 1])]
)
def test_each_value_of_a_sweep_has_its_point(values: list[str], places: list[float]):
    runs = [{"request_throughput": 5.0 + i, "median_ttft_ms": 9.0 - i, "median_tpot_ms": None} for i in range(3)]
    figure = plot.of_sweep({"flag": "--x", "values": values, "runs": runs[: len(values)]})
    left, right = figure.axes
    assert (left.get_title(), right.get_title()) == ("Throughput", "Latencies")
    assert left.get_xlabel() == "--x"
    (throughput,), (ttft,) = left.lines, right.lines  # what a run lacks has no line
    figure.draw_without_rendering()
    for line in (throughput, ttft):
        assert np.asarray(line.get_xdata(orig=False), float).tolist() == places
        assert np.isfinite(line.get_ydata()).all() and len(line.get_ydata()) == len(values)
    assert right.get_legend().get_texts()[0].get_text() == "TTFT, median"


@pytest.mark.parametrize("name", ["out.jepg", "out"])
def test_an_ending_that_is_none(name: str):
    with pytest.raises(ConfigError, match=rf"--plot: {name} has none of the endings .*\.png"):
        plot.check(Path(name))
    plot.check(Path("OUT.PNG"))
