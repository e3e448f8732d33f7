"""Regime `serve`: what clients of an OpenAI-compatible server wait for, with vLLM's flags, table and result files.

Without flags it asks the server on port 8000 about synthetic videos of the kind that the bundled model knows, 8 at a
time, and shows how many answers were right beside how fast they came. Prompts are made, and media encoded, before any
clock runs; answers are streamed, and greedy without --temperature. What each figure means stands in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse

from mini_engine.bench.report import Report, plain
from mini_engine.bench.serving.flags import add_arguments

__all__ = ["HELP", "add_arguments", "run"]
HELP = "requests to an OpenAI-compatible server, as its clients send them; the default"


def run(args: argparse.Namespace) -> Report:
    """Measure one server, print the table, write what was asked for."""
    from mini_engine.bench.serving import plot, results
    from mini_engine.bench.serving.measure import prepared, run_once, say
    from mini_engine.bench.serving.settings import settings_of

    settings = settings_of(args)
    with prepared(settings) as ready:
        measured = run_once(ready, "Serving Benchmark Result")
    print(measured.text, flush=True)
    if settings.output.save:
        for path in results.save(settings, measured, plain(vars(args))):
            say(f"wrote {path}")
    if settings.output.plot is not None:
        plot.draw(measured, settings.output.plot)
        say(f"wrote {settings.output.plot}")
    return Report({"model": measured.model, **measured.figures}, measured.failures)
