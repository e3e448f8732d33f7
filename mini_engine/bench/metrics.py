"""From the outcomes of a run to its metrics, under the names of vLLM's serving benchmark, and to the table of them.

    TTFT  from sending to the first chunk that has `choices`
    ITL   between two such chunks, all requests together
    E2EL  from sending to the last event
    TPOT  (E2EL - TTFT) / (tokens - 1), of requests with two tokens or more

Only requests that were answered to the end count. docs/benchmarks.md says where vLLM's client counts otherwise.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mini_engine.bench.client import Outcome, Run
from mini_engine.bench.report import table

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
COUNTS = {  # key of the metrics -> what the row says
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total Token throughput (tok/s):",
}
WIDTH = 50
SHOWN_ERRORS = 5
BUSY_SHARE = 0.8  # of the one core that the client can use


@dataclass(frozen=True)
class Wanted:
    """Which metrics are wanted."""

    metrics: Sequence[str] = tuple(TITLES)
    percentiles: Sequence[float] = (99.0,)
    goodput: dict[str, float] = field(default_factory=dict)  # ttft, tpot or e2el -> most milliseconds


def compute(run: Run, wanted: Wanted) -> dict[str, Any]:
    """The metrics as plain data; latencies in milliseconds, None where nothing was measured."""
    done = [outcome for outcome in run.outcomes if outcome.ok]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    found: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(done),
        "failed": len(run.outcomes) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / run.seconds,
        "output_throughput": output_tokens / run.seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / run.seconds,
        "max_output_tokens_per_s": best_second(run),
        "max_concurrent_requests": int(max(in_flight(run)[1])),
    }
    if wanted.goodput:
        found["request_goodput"] = sum(_is_good(outcome, wanted.goodput) for outcome in done) / run.seconds
    for metric, values in latencies(done).items():
        if metric in wanted.metrics:
            statistics = summary(values, wanted.percentiles)
            found |= {f"{name}_{metric}_ms": value for name, value in statistics.items()}
    known = [outcome.right for outcome in done if outcome.right is not None]
    found["accuracy"] = {"right": sum(known), "known": len(known), "share": sum(known) / len(known)} if known else None
    found["stages_ms"] = _stages(done, wanted.percentiles)
    found["client_cpu_share"] = run.cpu_share
    return found


def latencies(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """The milliseconds of each metric, of requests that were answered to the end."""
    seconds = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [tpot for outcome in done if (tpot := outcome.tpot) is not None],
        "itl": [itl for outcome in done for itl in outcome.itls],
        "e2el": [outcome.e2el for outcome in done],
    }
    return {metric: [1000 * value for value in values] for metric, values in seconds.items()}


def summary(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles."""
    names = ["mean", "median", "std", *(f"p{share:g}" for share in percentiles)]
    if not values:
        return dict.fromkeys(names)
    found = [np.mean(values), np.median(values), np.std(values), *np.percentile(values, list(percentiles))]
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def _is_good(outcome: Outcome, goodput: dict[str, float]) -> bool:
    """Whether a request met every limit; one token has no TPOT, which then is 0."""
    found = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.e2el}
    return all(1000 * found[metric] <= limit for metric, limit in goodput.items())


def arrived(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Seconds after the start at which tokens arrived, ascending, and how many: a request's are distributed evenly over
    its chunks."""
    done = [one for one in run.outcomes if one.ok]
    found = [(chunk - run.begun, one.output_tokens / len(one.chunks)) for one in done for chunk in one.chunks]
    moments, tokens = np.array(sorted(found)).reshape(-1, 2).T
    return moments, tokens


def best_second(run: Run) -> float | None:
    """The most tokens that arrived within a second, which may begin at any moment; None for a run shorter than that."""
    moments, tokens = arrived(run)
    if run.seconds < 1 or not len(moments):
        return None
    so_far = np.concatenate([[0.0], np.cumsum(tokens)])
    return float(np.max(so_far[1:] - so_far[np.searchsorted(moments, moments - 1, side="right")]))


def in_flight(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Seconds after the start at which a request began or ended, and how many were in flight from then on."""
    changes = sorted([(one.begun, 1) for one in run.outcomes] + [(one.ended, -1) for one in run.outcomes])
    moments, steps = np.array(changes).T
    return moments - run.begun, np.cumsum(steps)


def _stages(done: Sequence[Outcome], percentiles: Sequence[float]) -> dict[str, dict[str, float | None]] | None:
    """The server's own account of its time by stage, in milliseconds, with each stage's share of the whole."""
    reported = [outcome.stages for outcome in done if outcome.stages is not None]
    if not reported:
        return None
    whole = sum(sum(one.values()) for one in reported) or 1.0
    by_stage = {stage: [1000 * one[stage] for one in reported] for stage in reported[0]}
    return {
        stage: summary(values, percentiles) | {"share": sum(values) / 1000 / whole}
        for stage, values in by_stage.items()
    }


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each of the most frequent errors."""
    errors = collections.Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    return [f"{count} of {len(outcomes)} requests: {text}" for text, count in errors.most_common(SHOWN_ERRORS)]


def describe(found: dict[str, Any], wanted: Wanted, title: str) -> str:
    """The table: vLLM's rows in its order, then answers, stages, and the client itself."""
    lines = [f" {title} ".center(WIDTH, "=")]
    optional = {"max_concurrency", "request_goodput"}  # rows only where there was such a flag
    lines += [_row(COUNTS[key], found.get(key)) for key in COUNTS if found.get(key) is not None or key not in optional]
    names = {"mean": "Mean", "median": "Median"} | {f"p{share:g}": f"P{share:g}" for share in wanted.percentiles}
    for metric in wanted.metrics:
        lines.append(TITLES[metric].center(WIDTH, "-"))
        lines += [_row(f"{name} {metric.upper()} (ms):", found[f"{key}_{metric}_ms"]) for key, name in names.items()]
    lines.append("=" * WIDTH)
    if known := found["accuracy"]:
        lines.append(_row("Correct answers:", f"{known['right']} of {known['known']} ({known['share']:.1%})"))
    if stages := found["stages_ms"]:
        rows = [[stage, *(one[key] for key in names), f"{one['share']:.1%}"] for stage, one in stages.items()]
        lines += ["", "Stages of a request in the server (ms):", table(["", *names, "share"], rows)]
    lines += ["", f"The client used {found['client_cpu_share']:.0%} of one core."]
    if found["client_cpu_share"] > BUSY_SHARE:
        lines.append("The client was a bottleneck, so latencies include its own. Give it a core, or lower the load.")
    return "\n".join(lines)


def _row(label: str, value: object) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text}"
