"""Regime `core`: what the engine core costs, to a client beside heavy traffic and to the model's own speed.

Part `latency`: does a short text request wait behind videos? See `text_under_video.py`.
Part `step`: what does the engine add to the model's own time? See `engine_step.py`.
"""

from __future__ import annotations

import argparse

from mini_engine.bench.parser import at_least, split_flags, whole
from mini_engine.bench.report import BenchError, Report
from mini_engine.stdout import tell

HELP = "text requests behind videos, and the engine's own share of a step"
PARTS = ("latency", "step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of both parts."""
    parser.add_argument("--part", choices=PARTS, help="Run this part only.")
    parser.add_argument("--launch", default="", metavar="FLAGS", help="Flags of serve.py for what is measured.")
    latency = parser.add_argument_group("latency")
    latency.add_argument("--clients", type=at_least(1), default=8, help="Clients that send videos (default: 8).")
    latency.add_argument("--videos", type=at_least(1), default=64, help="Videos in all, no two alike (default: 64).")
    latency.add_argument("--texts", type=at_least(1), default=50, help="Text requests while idle (default: 50).")
    latency.add_argument(
        "--video-sizing", choices=("full", "model"), default="full",
        help="full: ten frames of 640x480, some 2,000 tokens; model: as the model's preprocessor says (default: full).",
    )  # fmt: skip
    latency.add_argument(
        "--seed", type=whole, default=0, help="Of the videos and of the pauses between text requests (default: 0)."
    )
    step = parser.add_argument_group("step")
    step.add_argument(
        "--batches", type=at_least(1), nargs="+", default=[1, 8, 32, 64], help="Sequences (default: 1 8 32 64)."
    )
    step.add_argument("--steps", type=at_least(1), default=200, help="Steps timed at a time (default: 200).")
    step.add_argument("--repeats", type=at_least(1), default=5, help="Times; medians count (default: 5).")


def run(args: argparse.Namespace) -> Report:
    """Run the parts that were asked for, one after the other; each prints its table when it is done."""
    report = Report({})
    flags = split_flags("--launch", args.launch)
    if args.part in (None, "latency"):
        from mini_engine.bench import text_under_video

        setting = text_under_video.Setting(args.clients, args.videos, args.texts, args.video_sizing, args.seed)
        report.figures["latency"] = text_under_video.measure(flags, setting, report.failures)
        report.failures += tell(text_under_video.describe(report.figures["latency"]))
    if args.part in (None, "step"):
        from mini_engine.bench import engine_step

        try:
            report.figures["step"] = engine_step.measure(flags, args.batches, args.steps, args.repeats)
        except BenchError as error:
            if not report.figures:
                raise
            report.failures.append(f"step: {error}")  # what was measured before stands
        else:
            report.failures += tell(engine_step.describe(report.figures["step"]))
    return report
