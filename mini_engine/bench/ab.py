"""Two servers of this project that differ in their flags, on the same prompts.

A and B are started in turn, A B B A and so on, each fresh for each round, so that drift of the machine hits both alike.
The flags of `--launch` are for both. Every run is warmed up first and sends the same bytes. The ratio B/A of a metric
is that of the means over all rounds; its spread goes from the least to the greatest ratio of a round. Answers are
greedy without --temperature, so they are compared as well: how many prompts were not answered alike by all runs.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from mini_engine.bench import serve
from mini_engine.bench.datasets import load
from mini_engine.bench.report import Report, table
from mini_engine.bench.serve import Measured
from mini_engine.bench.server import open_target, server_flags
from mini_engine.config import ConfigError

THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
Runs = dict[str, list[Measured]]


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
    sides = {side: server_flags(f"--{side}", f"{args.launch} {vars(args)[side]}") for side in "ab"}
    if args.plot is not None:
        raise ConfigError("--plot is not for ab; use it with bench.py serve or bench.py sweep")
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
    results = compare(runs)
    answers = results["answers"]
    print(f"A: {args.a.strip() or 'defaults'}\nB: {args.b.strip() or 'defaults'}\nboth: {args.launch or 'defaults'}")
    print(f"Means of {args.rounds} round(s), and the ratio with the least and greatest of a round:\n")
    print(table(["", "A", "B", "B/A", "least", "greatest"], [[k, *r.values()] for k, r in results["ratios"].items()]))
    print(f"\nPrompts with different answers: {answers['differ']} of {answers['prompts']}")
    return Report(results, failures)


def compare(runs: Runs) -> dict[str, Any]:
    """Each metric of both sides with its ratio, and how many answers differ."""
    values = {side: [_values(measured.results) for measured in found] for side, found in runs.items()}
    texts = [[one.text if one.ok else None for one in measured.run.outcomes] for measured in runs["a"] + runs["b"]]
    differ = sum(len(set(of_prompt) - {None}) > 1 for of_prompt in zip(*texts, strict=True))
    return {
        "ratios": {key: ratio for key in values["a"][0] if (ratio := _ratio(key, values)) is not None},
        "answers": {"prompts": len(texts[0]), "differ": differ},
        "runs": {side.upper(): [measured.results for measured in found] for side, found in runs.items()},
    }


def _values(results: dict[str, Any]) -> dict[str, float | None]:
    """What is compared: throughputs, latencies, and the means of the server's stages."""
    latencies = [key for key in results if key.endswith("_ms") and key != "stages_ms" and not key.startswith("std_")]
    stages = {f"mean_{name}_ms": stage["mean"] for name, stage in (results["stages_ms"] or {}).items()}
    return {key: results[key] for key in (*THROUGHPUTS, *latencies)} | stages


def _ratio(key: str, values: dict[str, list[dict[str, float | None]]]) -> dict[str, float] | None:
    """None where a run has no such metric, or it is 0 for A."""
    a, b = (np.array([one.get(key) for one in values[side]], float) for side in "ab")  # None becomes NaN
    if np.isnan(b).any() or np.isnan(a).any() or not a.all():
        return None
    found = {"a": a.mean(), "b": b.mean(), "ratio": b.mean() / a.mean(), "least": min(b / a), "greatest": max(b / a)}
    return {name: float(value) for name, value in found.items()}
