"""From the outcomes of a run to its metrics, under the names of vLLM's serving benchmark, and to a table in its words.

docs/benchmarks.md defines them, and says where vLLM's client counts otherwise.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.client import Outcome, Run

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
ROWS = {  # in the order and the words of vLLM's table
    "completed": "Successful requests", "failed": "Failed requests", "max_concurrency": "Maximum request concurrency",
    "request_rate": "Request rate configured (RPS)", "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens", "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)", "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s)",
    "max_concurrent_requests": "Peak concurrent requests", "total_token_throughput": "Total token throughput (tok/s)",
}  # fmt: skip
OWN_ROWS = {
    "start_memory_mb": "Server memory at start (MB)",
    "peak_memory_mb": "Peak server memory (MB)",
    "client_cpu_share": "Client CPU share (of one core)",
    "seed": "Random seed",
}
UNSET = (("max_concurrency", None), ("request_rate", "inf"))
WIDTH = 50
SHOWN_ERRORS = 5
BUSY_SHARE = 0.8  # of the one core that the client can use
CACHED_SHARE = 0.5  # of the requests with media, above which a run measured the caches


def compute(
    run: Run,
    answers: Sequence[str | None] = (),
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The metrics as plain data; latencies in milliseconds, None where nothing was measured.

    Args:
        answers: the right ones, None where none is known.
        percentiles: of latencies.
        goodput: ttft, tpot or e2el -> most milliseconds.
    """
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
    if goodput:
        found["request_goodput"] = sum(_is_good(outcome, goodput) for outcome in done) / run.seconds
    for metric, values in latencies(done).items():
        found |= {f"{name}_{metric}_ms": value for name, value in summary(values, percentiles).items()}
    pairs = zip(run.outcomes, answers, strict=False)
    known = [outcome.text.strip() == answer for outcome, answer in pairs if outcome.ok and answer is not None]
    found["accuracy"] = {"right": sum(known), "known": len(known), "share": sum(known) / len(known)} if known else None
    found["stages_ms"] = _stages(done, percentiles)
    found["cached_media_share"] = _cached_share(done)
    found["client_cpu_share"] = run.cpu_share
    return found


def latencies(done: Sequence[Outcome]) -> dict[str, np.ndarray]:
    """The milliseconds of each metric, of requests that were answered to the end."""
    seconds = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [tpot for outcome in done if (tpot := outcome.tpot) is not None],
        "itl": [itl for outcome in done for itl in outcome.itls],
        "e2el": [outcome.e2el for outcome in done],
    }
    return {metric: 1000 * np.array(values) for metric, values in seconds.items()}


def summary(values: np.ndarray, percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles."""
    names = ["mean", "median", "std", *(f"p{share:g}" for share in percentiles)]
    if not len(values):
        return dict.fromkeys(names)
    statistics = [np.mean(values), np.median(values), np.std(values), *np.percentile(values, percentiles)]
    return dict(zip(names, map(float, statistics), strict=True))


def _is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Whether a request met every limit; one token has no TPOT, which then is 0."""
    return all(1000 * (getattr(outcome, metric) or 0.0) <= limit for metric, limit in goodput.items())


def arrived(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Seconds after the start at which tokens arrived, ascending, and how many: a request's are distributed evenly over
    its chunks."""
    shares = [
        (chunk - run.begun, outcome.output_tokens / len(outcome.chunks))
        for outcome in run.outcomes
        if outcome.ok
        for chunk in outcome.chunks
    ]
    moments, tokens = np.array(sorted(shares)).reshape(-1, 2).T
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
    changes = sorted(change for outcome in run.outcomes for change in ((outcome.begun, 1), (outcome.ended, -1)))
    moments, steps = np.array(changes).T
    return moments - run.begun, np.cumsum(steps)


def _stages(done: Sequence[Outcome], percentiles: Sequence[float]) -> dict[str, dict[str, float | None]] | None:
    """The server's own account of its time by stage, in milliseconds, with each stage's share of the whole."""
    reported = [outcome.stages for outcome in done if outcome.stages is not None]
    if not reported:
        return None
    by_stage = {stage: 1000 * np.array([stages[stage] for stages in reported]) for stage in reported[0]}
    whole = sum(values.sum() for values in by_stage.values()) or 1.0
    return {
        stage: summary(values, percentiles) | {"share": float(values.sum() / whole)}
        for stage, values in by_stage.items()
    }


def _cached_share(done: Sequence[Outcome]) -> float | None:
    """The share of requests with media for which the server decoded none or encoded none; None: it does not say."""
    reported = [outcome.stages for outcome in done if outcome.stages is not None and outcome.num_media]
    cached = sum(0 in (stages["media_decode"], stages["encode"]) for stages in reported)
    return cached / len(reported) if reported else None


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each of the most frequent errors."""
    errors = collections.Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    return [f"{count} of {len(outcomes)} requests: {text}" for text, count in errors.most_common(SHOWN_ERRORS)]


def describe(found: Mapping[str, Any], metrics: Iterable[str] = METRICS) -> str:
    """The table of vLLM's serving benchmark with the latencies `metrics`; below it, in its layout, what that lacks."""
    names = {key: name for key, name in ROWS.items() if (key, found.get(key)) not in UNSET}
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_rows(found, names)]
    for metric in metrics:
        statistics = [key.split("_")[0] for key in found if key.endswith(f"_{metric}_ms") and key[:3] != "std"]
        names = {f"{name}_{metric}_ms": f"{name.capitalize()} {metric.upper()} (ms)" for name in statistics}
        lines += [f"{METRICS[metric]:-^{WIDTH}}", *_rows(found, names)]
    lines.append("=" * WIDTH)
    if known := found["accuracy"]:
        lines.append(_row("Correct answers", f"{known['right']} of {known['known']}"))
    lines += _rows(found, OWN_ROWS)
    if stages := found["stages_ms"]:
        lines.append(f"{'Server Stages: Mean (ms), Share':-^{WIDTH}}")
        lines += [_row(stage, f"{one['mean']:<10.2f} {one['share']:.0%}") for stage, one in stages.items()]
    if found["client_cpu_share"] > BUSY_SHARE:
        lines.append("The client was a bottleneck, so latencies include its own. Give it a core, or lower the load.")
    if (share := found["cached_media_share"] or 0.0) > CACHED_SHARE:
        lines.append(
            f"The server had cached the media of {share:.0%} of the requests, so their decoding or encoding was not "
            "measured. Omit --seed, start a new server, or POST /reset_caches."
        )
    return "\n".join(lines)


def _rows(found: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    return [_row(name, found[key]) for key, name in names.items() if key in found]


def _row(name: str, value: object) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name + ':':<40} {text}"
