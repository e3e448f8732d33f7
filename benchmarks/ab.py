"""Two servers of this project that differ in their flags, on the same prompts.

A and B are started in turn, A B B A and so on, each fresh for each round, so that drift of the machine hits both alike.
The flags of `--launch` are for both. Every run is warmed up first and sends the same bytes. The ratio B/A of a metric
is that of the means over all rounds; its spread goes from the least to the greatest ratio of a round. Answers are
greedy without --temperature, so they are compared as well: how many prompts were not answered alike by all runs.
"""

import argparse
import copy
from typing import Any

import numpy as np

from benchmarks import serve
from benchmarks.cli import Report, table
from benchmarks.serve import Measured
from benchmarks.server import server_flags

THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two servers' flags, and those of `serve`, where `--launch` is for both."""
    group = parser.add_argument_group("servers")
    group.add_argument("--a", required=True, metavar="FLAGS", help='Flags of server A; "" for none.')
    group.add_argument("--b", required=True, metavar="FLAGS", help="Flags of server B.")
    group.add_argument("--rounds", type=int, default=2, help="Runs of each server (default: 2).")
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Run all rounds, then print the comparison."""
    args.launch = args.launch or ""
    serve.check(args)
    sides = {side: copy.copy(args) for side in "ab"}
    for side, mine in sides.items():
        mine.launch = f"{args.launch} {vars(args)[side]}"
        server_flags(f"--{side}", mine.launch)
    runs: dict[str, list[Measured]] = {"a": [], "b": []}
    prompts = None
    for number in range(args.rounds):
        for side in ("ab", "ba")[number % 2]:
            measured = serve.measure(sides[side], f"{side.upper()}{number + 1}", prompts)
            prompts = measured.prompts
            runs[side].append(measured)
    results = compare(runs["a"], runs["b"])
    answers = results["answers"]
    print(f"A: {args.a.strip() or 'defaults'}\nB: {args.b.strip() or 'defaults'}\nboth: {args.launch or 'defaults'}")
    print(f"Means of {args.rounds} round(s), and the ratio with the least and greatest of a round:\n")
    print(table(["", "A", "B", "B/A", "least", "greatest"], [[k, *r.values()] for k, r in results["ratios"].items()]))
    print(f"\nPrompts with different answers: {answers['differ']} of {answers['prompts']}")
    return Report(results, [failure for measured in runs["a"] + runs["b"] for failure in measured.failures])


def compare(a: list[Measured], b: list[Measured]) -> dict[str, Any]:
    """Each metric of both sides with its ratio, and how many answers differ."""
    values = [[_values(measured.results) for measured in side] for side in (a, b)]
    texts = [[outcome.text if outcome.ok else None for outcome in measured.run.outcomes] for measured in a + b]
    differ = sum(len(set(of_prompt) - {None}) > 1 for of_prompt in zip(*texts, strict=True))
    ratios = {}
    for key in values[0][0]:
        of_a, of_b = (np.array([results.get(key) for results in side], float) for side in values)  # None becomes NaN
        if of_a.all() and not np.isnan([of_a, of_b]).any():
            columns = [of_a.mean(), of_b.mean(), of_b.mean() / of_a.mean(), min(of_b / of_a), max(of_b / of_a)]
            ratios[key] = dict(zip(("a", "b", "ratio", "least", "greatest"), map(float, columns), strict=True))
    return {
        "ratios": ratios,  # without those of which a run has no value, or A's is 0
        "answers": {"prompts": len(texts[0]), "differ": differ},
        "runs": {"A": [measured.results for measured in a], "B": [measured.results for measured in b]},
    }


def _values(results: dict[str, Any]) -> dict[str, float | None]:
    """What is compared: throughputs, latencies, and the means of the server's stages."""
    latencies = [key for key in results if key.endswith("_ms") and key != "stages_ms" and not key.startswith("std_")]
    stages = {f"mean_{name}_ms": stage["mean"] for name, stage in (results["stages_ms"] or {}).items()}
    return {key: results[key] for key in (*THROUGHPUTS, *latencies)} | stages
