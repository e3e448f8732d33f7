"""Regime `serve`: what clients of an OpenAI-compatible server wait for, with vLLM's flags, table and result files.

Without flags it asks the server on port 8000 about synthetic videos of the kind that the bundled model knows, 8 at a
time, and shows how many answers were right beside how fast they came. Prompts are made, and media encoded, before any
clock runs; answers are streamed, and greedy without --temperature. What each figure means stands in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
from functools import partial

from mini_engine.bench.redaction import config_of
from mini_engine.bench.report import Report
from mini_engine.bench.serving.flags import add_arguments
from mini_engine.stdout import tell

__all__ = ["HELP", "add_arguments", "run"]
HELP = "requests to an OpenAI-compatible server, as its clients send them; the default"


def run(args: argparse.Namespace) -> Report:
    """Measure one server and print the table; files are written when the last line is out."""
    from mini_engine.bench.serving import results
    from mini_engine.bench.serving.measure import prepared, run_once
    from mini_engine.bench.serving.settings import settings_of

    settings = settings_of(args)
    picture = settings.output.plot
    if picture is not None:
        from mini_engine.bench.serving import plot

        plot.check(picture)
    with prepared(settings) as ready:
        measured = run_once(ready, "Serving Benchmark Result")
    measured.failures.extend(tell(measured.text))
    figures = {"model": measured.model, **measured.figures}
    report = Report(figures, measured.failures, all_here=settings.launch is not None)
    if settings.output.save_result:
        report.files.append(partial(results.save, settings, measured, config_of(args)))
    if picture is not None:
        report.files.append(lambda: plot.draw(plot.of_run(measured), picture))
    return report
