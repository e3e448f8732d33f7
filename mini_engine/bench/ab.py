"""Two servers of this project that differ in their flags, on the same prompts.

A and B are started in turn, A B B A and so on, each fresh for each round, so that drift of the machine hits both alike.
The flags of `--launch` are for both. Every run is warmed up first and sends the same bytes. The ratio B/A of a metric
is that of the means over all rounds; its spread goes from the least to the greatest ratio of a round. Answers are
greedy without --temperature, so they are compared as well: how many prompts were not answered alike by all runs, and by
those of one side.
"""

from __future__ import annotations

import argparse
import collections
from typing import Any

import numpy as np

from mini_engine.bench import serve
from mini_engine.bench.datasets import load
from mini_engine.bench.report import Report, table
from mini_engine.bench.serve import Measured
from mini_engine.bench.server import open_target, server_flags
from mini_engine.config import ConfigError

THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
ROW = ("request_throughput", "median_ttft_ms", "median_e2el_ms")  # what one line of a document holds
Runs = dict[str, list[Measured]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two servers' flags, and those of `serve`, where `--launch` is for both."""
    group = parser.add_argument_group("servers")
    group.add_argument("--a", required=True, metavar="FLAGS", help='Flags of the one server, such as "" for none.')
    group.add_argument("--b", required=True, metavar="FLAGS", help="Flags of the other.")
    group.add_argument("--rounds", type=serve.at_least(1), default=2, help="Runs of each (default: 2).")
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Run all rounds, then print the comparison."""
    args.launch = args.launch or ""
    sides = {side: server_flags(f"--{side}", f"{args.launch} {vars(args)[side]}") for side in "ab"}
    if args.plot is not None:
        raise ConfigError("--plot draws one run or a sweep: use it with bench.py serve or bench.py sweep")
    serve.check(args)
    runs: Runs = {"a": [], "b": []}
    failures, prompts = [], None
    order = [(side, number + 1) for number in range(args.rounds) for side in ("ab", "ba")[number % 2]]
    for side, number in order:
        with open_target(args, sides[side]) as target:
            prompts = prompts or load(args, target.model)
            measured = serve.measure(args, target, prompts, f"{side.upper()}, round {number}")
        print(f"{measured.text}\n", flush=True)
        runs[side].append(measured)
        failures += [f"{side.upper()}{number}: {failure}" for failure in measured.failures]
        serve.save(args, measured, f"{side.upper()}{number}")
    figures = compare(runs)
    print(describe(figures, args))
    return Report(figures, failures)


def compare(runs: Runs) -> dict[str, Any]:
    """Each metric of both sides with its ratio, and how the answers differ."""
    values = {side: [_values(measured.figures) for measured in found] for side, found in runs.items()}
    return {
        "ratios": {key: ratio for key in values["a"][0] if (ratio := _ratio(key, values)) is not None},
        "answers": {
            "prompts": len(runs["a"][0].run.outcomes),
            "differ": differing(runs["a"] + runs["b"]),
            "differ_in_a": differing(runs["a"]),
            "differ_in_b": differing(runs["b"]),
        },
        "runs": {side.upper(): [measured.figures for measured in found] for side, found in runs.items()},
    }


def _values(figures: dict[str, Any]) -> dict[str, float | None]:
    """What is compared: throughputs, latencies, and the means of the server's stages."""
    latencies = [key for key in figures if key.endswith("_ms") and key != "stages_ms" and not key.startswith("std_")]
    stages = {f"mean_{name}_ms": stage["mean"] for name, stage in (figures["stages_ms"] or {}).items()}
    return {key: figures[key] for key in (*THROUGHPUTS, *latencies)} | stages


def _ratio(key: str, values: dict[str, list[dict[str, float | None]]]) -> dict[str, float] | None:
    """None where a run has no such metric, or it is 0 for A."""
    a, b = ([one.get(key) for one in values[side]] for side in "ab")
    if None in b or not all(a):
        return None
    of_rounds = np.array(b, float) / np.array(a, float)
    mean_a, mean_b = np.mean(np.array(a, float)), np.mean(np.array(b, float))
    found = {"a": mean_a, "b": mean_b, "ratio": mean_b / mean_a, "least": of_rounds.min(), "greatest": of_rounds.max()}
    return {name: round(float(value), 6) for name, value in found.items()}


def differing(runs: list[Measured]) -> int:
    """Prompts that were answered in two or more of these runs, and not always by the same text."""
    texts: dict[int, set[str]] = collections.defaultdict(set)
    for outcome in (outcome for measured in runs for outcome in measured.run.outcomes if outcome.ok):
        texts[outcome.number].add(outcome.text)
    return sum(len(found) > 1 for found in texts.values())


def describe(figures: dict[str, Any], args: argparse.Namespace) -> str:
    """The comparison for people, and its main metrics as a line of a Markdown table."""
    a, b, both = (text.strip() or "defaults" for text in (args.a, args.b, args.launch))
    ratios, answers = figures["ratios"], figures["answers"]
    rows = [[key, *ratio.values()] for key, ratio in ratios.items()]
    cells = [f"`{a}`", f"`{b}`", f"{1.0 if args.unique_ratio is None else args.unique_ratio:g}"]
    cells += ["{ratio:.2f} ({least:.2f}–{greatest:.2f})".format(**ratios[key]) if key in ratios else "-" for key in ROW]
    return "\n".join(
        [
            f"A: {a}",
            f"B: {b}",
            f"both: {both}",
            f"Means of {args.rounds} round(s), and the ratio with the least and greatest of a round:",
            "",
            table(["", "A", "B", "B/A", "least", "greatest"], rows),
            "",
            f"Prompts not answered alike by all runs: {answers['differ']} of {answers['prompts']}; by the runs of A: "
            f"{answers['differ_in_a']}, of B: {answers['differ_in_b']}",
            *_disturbed(figures["runs"]),
            "",
            f"| A | B | unique | {' | '.join(f'{key} B/A' for key in ROW)} |",
            "|---" * len(cells) + "|",
            f"| {' | '.join(cells)} |",
        ]
    )


def _disturbed(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Which rounds a reader should not trust, by what each run's own table says of the client."""
    lines = []
    for key, text in (("host_busy", "the host was busy"), ("bottleneck", "the client was a bottleneck")):
        names = [f"{side}{n}" for side, found in runs.items() for n, one in enumerate(found, 1) if one["client"][key]]
        if names:
            lines.append(
                f"In {', '.join(names)} {text}, which is part of the ratios: use more --rounds, or a quieter host."
            )
    return lines
