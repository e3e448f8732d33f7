"""Regime `ab`: two servers of this project that differ in their flags, on the same prompts.

A and B are started in turn, A B B A and so on, each fresh for each round, so that drift of the machine hits both alike.
The flags of `--launch` are for both. Every run is warmed up first and sends the same bytes. The ratio B/A of a figure
is that of the means over all rounds; its spread goes from the least to the greatest ratio of a round. Answers are
greedy without --temperature, so they are compared as well: how many prompts were not answered alike by all runs, and by
those of one side.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

from mini_engine.bench.files import write
from mini_engine.bench.parser import at_least
from mini_engine.bench.redaction import config_of, without_secrets
from mini_engine.bench.report import Report, table
from mini_engine.bench.serving import flags
from mini_engine.config import ConfigError
from mini_engine.stdout import tell

if TYPE_CHECKING:
    from mini_engine.bench.serving.measure import Measured
    from mini_engine.bench.serving.settings import Settings

HELP = "two servers with different flags on the same prompts, in turn"
MOST_ROUNDS = 1000
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
ROW = ("request_throughput", "median_ttft_ms", "median_e2el_ms")  # what one line of a document holds
Runs = dict[str, list["Measured"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two servers' flags, and those of `serve`, where `--launch` is for both."""
    group = parser.add_argument_group("servers")
    group.add_argument("--a", required=True, metavar="FLAGS", help='Flags of the one server, such as "" for none.')
    group.add_argument("--b", required=True, metavar="FLAGS", help="Flags of the other.")
    group.add_argument("--rounds", type=at_least(1, MOST_ROUNDS), default=2, help="Runs of each (default: 2).")
    flags.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Run all rounds, then print the comparison."""
    from mini_engine.bench.serving import results
    from mini_engine.bench.serving.measure import next_of, prepared, run_once
    from mini_engine.bench.serving.settings import server_flags, settings_of

    if args.base_url or args.host or args.port:
        raise ConfigError("ab starts both servers itself: leave out --base-url, --host and --port")
    if args.plot is not None:
        raise ConfigError("--plot draws one run or a sweep: use it with bench.py serve or bench.py sweep")
    both = args.launch or ""
    sides = {"A": server_flags("--a", f"{both} {args.a}"), "B": server_flags("--b", f"{both} {args.b}")}
    settings = settings_of(argparse.Namespace(**{**vars(args), "launch": both}))
    runs: Runs = {"A": [], "B": []}
    report = Report({})
    order = [(side, number + 1) for number in range(args.rounds) for side in ("AB", "BA")[number % 2]]
    with prepared(settings) as ready:
        for side, number in order:
            mine = dataclasses.replace(settings, launch=sides[side])
            name = f"{side}{number}"
            once = partial(run_once, dataclasses.replace(ready, settings=mine), f"{side}, round {number}")
            measured = next_of(bool(runs["A"]), name, report, once)
            if measured is None:
                break
            report.failures += tell(f"{measured.text}\n")
            runs[side].append(measured)
            report.failures += [f"{name}: {failure}" for failure in measured.failures]
            if settings.output.save_result:
                report.failures += write([partial(results.save, mine, measured, config_of(args), name)])
    report.figures = compare(runs, settings)
    report.failures += tell(describe(report.figures, args, settings))
    return report


def compare(runs: Runs, settings: Settings) -> dict[str, Any]:
    """Each figure of both sides with its ratio, and how the answers differ."""
    statistic = ("mean", "median", *(f"p{share:g}" for share in settings.measures.percentiles))
    latencies = [f"{name}_{metric}_ms" for metric in settings.measures.metrics for name in statistic]
    a, b = runs["A"], runs["B"]
    values = {key: [[one.figures.get(key) for one in side] for side in (a, b)] for key in (*THROUGHPUTS, *latencies)}
    values |= {
        f"mean_{stage}_ms": [_stage(side, stage) for side in (a, b)] for stage in a[0].figures["stages_ms"] or ()
    }
    return {
        "ratios": {key: ratio for key, sides in values.items() if (ratio := _ratio(*sides)) is not None},
        "answers": {
            "prompts": settings.data.count,
            "differ": differing(a + b),
            "differ_in_a": differing(a),
            "differ_in_b": differing(b),
        },
        "runs": {side: [measured.figures for measured in found] for side, found in runs.items()},
    }


def _stage(side: list[Measured], stage: str) -> list[float | None]:
    """The server's mean for a stage in each run, in milliseconds."""
    return [(measured.figures["stages_ms"] or {}).get(stage, {}).get("mean") for measured in side]


def _ratio(a: list[float | None], b: list[float | None]) -> dict[str, float] | None:
    """Of the values of the rounds; None where a run has no such figure, or A's is 0. A round that broke off after its
    first run is left out.
    """
    rounds = min(len(a), len(b))
    ours = [value for value in a[:rounds] if value]
    theirs = [value for value in b[:rounds] if value is not None]
    if not rounds or len(ours) < rounds or len(theirs) < rounds:
        return None
    of_rounds = [theirs[number] / ours[number] for number in range(len(ours))]
    mean_a, mean_b = statistics.fmean(ours), statistics.fmean(theirs)
    return {
        "a": round(mean_a, 6), "b": round(mean_b, 6), "ratio": round(mean_b / mean_a, 4),
        "least": round(min(of_rounds), 4), "greatest": round(max(of_rounds), 4),
    }  # fmt: skip


def differing(runs: list[Measured]) -> int:
    """Prompts that were answered to the end in two or more of these runs, and not always by the same text."""
    texts: dict[int, set[str]] = {}
    for measured in runs:
        for outcome in measured.run.outcomes:
            if outcome.ok:
                texts.setdefault(outcome.number, set()).add(outcome.text)
    return sum(len(found) > 1 for found in texts.values())


def describe(figures: dict[str, Any], args: argparse.Namespace, settings: Settings) -> str:
    """The comparison for people, and its main figures as a line of a Markdown table."""
    columns = {"a": "A", "b": "B", "ratio": "B/A"}
    a, b, both = (without_secrets(text or "") or "defaults" for text in (args.a, args.b, args.launch))
    measured = "One round; with more, the ratios have a spread:"
    rounds = min(len(runs) for runs in figures["runs"].values())
    if rounds > 1:
        columns |= {"least": "least", "greatest": "greatest"}
        measured = f"Means of {rounds} rounds, and the ratio with the least and greatest of a round:"
    rows = [[key, *(ratio[column] for column in columns)] for key, ratio in figures["ratios"].items()]
    answers = figures["answers"]
    cells = [f"`{a}`", f"`{b}`", f"{settings.data.unique_ratio:g}"]
    for key in ROW:
        ratio = figures["ratios"].get(key)
        spread = f" ({ratio['least']:.2f}–{ratio['greatest']:.2f})" if ratio and rounds > 1 else ""
        cells.append(f"{ratio['ratio']:.2f}{spread}" if ratio else "-")
    return "\n".join(
        [
            f"A: {a}",
            f"B: {b}",
            f"both: {both}",
            measured,
            "",
            table(["", *columns.values()], rows),
            "",
            f"Prompts not answered alike by all runs: {answers['differ']} of {answers['prompts']}; by the runs of A: "
            f"{answers['differ_in_a']}, of B: {answers['differ_in_b']}",
            *_disturbed(figures["runs"]),
            "",
            f"| A | B | unique | {' | '.join(f'{key} B/A' for key in ROW)} |",
            "|---" * (3 + len(ROW)) + "|",
            f"| {' | '.join(cells)} |",
        ]
    )


def _disturbed(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Which rounds a reader should not trust, by what each run's own table says of the client."""
    texts = {"host_busy": "the host was busy", "bottleneck": "the client was a bottleneck"}
    lines = []
    for key, text in texts.items():
        names = [f"{side} {n}" for side, found in runs.items() for n, one in enumerate(found, 1)
                 if one.get("client", {}).get(key)]  # fmt: skip
        if names:
            lines.append(f"In {', '.join(names)} {text}: the ratios are of that too. More --rounds, or a quieter host.")
    return lines
