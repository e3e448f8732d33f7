"""From the outcomes of a run to its figures, under the names of vLLM's serving benchmark, and latencies by its
definitions:

    TTFT  from sending to the first chunk that has `choices`
    ITL   between two such chunks, all requests together
    E2EL  from sending to the last event
    TPOT  (E2EL - TTFT) / (tokens - 1), of requests with two tokens or more

Only requests that were answered to the end count. Otherwise than there: a prompt's tokens are those of the server's
`usage`, its media included; the most requests at once and the best second, which may begin at any moment, are exact
and not counted by whole seconds; and what has no counterpart there (cancelled streams, answers, stages, the client's
own load) has a name of its own.
"""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_engine.bench.report import percentile
from mini_engine.bench.serving.client import Outcome
from mini_engine.bench.serving.flags import METRICS
from mini_engine.bench.serving.load import Run

SHOWN_ERRORS = 5
DECIMALS = 6
BUSY_SHARE = 0.8  # of the one core that the client can use
LATE_SHARE = 0.1  # of the median request
IDLE_SHARE = 0.2  # a client that takes less of a core is not late by its own work


@dataclass(frozen=True)
class Measures:
    """Which figures are wanted."""

    metrics: Sequence[str] = METRICS
    percentiles: Sequence[float] = (99.0,)
    goodput: dict[str, float] = field(default_factory=dict)  # ttft, tpot or e2el -> most milliseconds


def figures_of(run: Run, measures: Measures) -> dict[str, Any]:
    """The figures as plain data; latencies in milliseconds, None where nothing was measured."""
    done = [outcome for outcome in run.outcomes if outcome.ok]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    seconds = max(run.seconds, 1e-9)
    figures: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(done),
        "failed": sum(outcome.error is not None for outcome in run.outcomes),
        "cancelled": sum(outcome.cancelled for outcome in run.outcomes),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
        "max_output_tokens_per_s": best_second(run),
        "max_concurrent_requests": max((count for _, count in under_way(run.outcomes)), default=0),
    }
    if measures.goodput:
        figures["request_goodput"] = sum(is_good(outcome, measures.goodput) for outcome in done) / seconds
    for metric, values in latencies(done).items():
        if metric in measures.metrics:
            figures |= summary(metric, values, measures.percentiles)
    known = [outcome.right for outcome in done if outcome.right is not None]
    figures["accuracy"] = (
        {"right": sum(known), "known": len(known), "share": sum(known) / len(known)} if known else None
    )
    figures["stages_ms"] = stages(done, measures.percentiles)
    figures["tokens_counted_by"] = sorted({outcome.counted_by for outcome in done})
    late = bool(done) and run.client.lag_p99 > LATE_SHARE * statistics.median(outcome.e2el for outcome in done)
    figures["client"] = {
        "cpu_share": run.client.cpu_share,
        "lag_p99_ms": 1000 * run.client.lag_p99,
        "lag_max_ms": 1000 * run.client.lag_max,
        "bottleneck": run.client.cpu_share > (IDLE_SHARE if late else BUSY_SHARE),
        "host_busy": late and run.client.cpu_share <= IDLE_SHARE,
    }
    return _rounded(figures)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """To six decimals, of milliseconds these are nanoseconds."""
    found = {}
    for key, value in values.items():
        inner = _rounded(value) if isinstance(value, dict) else value
        found[key] = round(inner, DECIMALS) if isinstance(inner, float) else inner
    return found


def latencies(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """The seconds of each metric, of requests that were answered to the end."""
    return {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [tpot for outcome in done if (tpot := outcome.tpot) is not None],
        "itl": [itl for outcome in done for itl in outcome.itls],
        "e2el": [outcome.e2el for outcome in done],
    }


def summary(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation (of the population, as numpy's) and percentiles, in milliseconds."""
    values = [1000 * value for value in seconds]
    return {
        f"mean_{name}_ms": statistics.fmean(values) if values else None,
        f"median_{name}_ms": statistics.median(values) if values else None,
        f"std_{name}_ms": statistics.pstdev(values) if values else None,
        **{f"p{share:g}_{name}_ms": percentile(values, share / 100) if values else None for share in percentiles},
    }


def is_good(outcome: Outcome, goodput: dict[str, float]) -> bool:
    """Whether a request met every limit, in milliseconds; one token has no TPOT, which then is 0."""
    found = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.e2el}
    return all(1000 * found[metric] <= limit for metric, limit in goodput.items())


def tokens_by_second(run: Run) -> list[float]:
    """Tokens that came in each second of the run."""
    found: dict[int, float] = collections.defaultdict(float)
    for moment, tokens in arrived(run):
        found[int(moment - run.begun)] += tokens
    return [found[second] for second in range(max(found, default=-1) + 1)]


def best_second(run: Run) -> float | None:
    """The most tokens that came within a second, which may begin at any moment; None for a run shorter than that."""
    if run.seconds < 1:
        return None
    best = within = 0.0
    window: collections.deque[tuple[float, float]] = collections.deque()
    for moment, tokens in arrived(run):
        window.append((moment, tokens))
        within += tokens
        while moment - window[0][0] >= 1:
            within -= window.popleft()[1]
        best = max(best, within)
    return best


def arrived(run: Run) -> list[tuple[float, float]]:
    """When tokens came and how many, in order; a request's tokens are shared out evenly over its chunks."""
    done = [outcome for outcome in run.outcomes if outcome.ok]
    return sorted((moment, one.output_tokens / len(one.chunks)) for one in done for moment in one.chunks)


def under_way(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """The moments at which a request began or ended, and how many were under way from then on."""
    changes = sorted([(one.begun, 1) for one in outcomes] + [(one.ended, -1) for one in outcomes])
    counts = itertools.accumulate(change for _, change in changes)
    return [(moment, count) for (moment, _), count in zip(changes, counts, strict=True)]


def stages(done: Sequence[Outcome], percentiles: Sequence[float]) -> dict[str, dict[str, float | None]] | None:
    """The server's own account of its time by stage, in milliseconds, with each stage's share of the whole."""
    told = [outcome.stages for outcome in done if outcome.stages is not None]
    if not told:
        return None
    whole = sum(sum(one.values()) for one in told) or 1.0
    found: dict[str, dict[str, float | None]] = {}
    for stage in told[0]:
        seconds = [one.get(stage, 0.0) for one in told]
        values = summary(stage, seconds, percentiles)
        found[stage] = {name.removesuffix(f"_{stage}_ms"): value for name, value in values.items()}
        found[stage]["share"] = sum(seconds) / whole
    return found


def distinct_errors(outcomes: Sequence[Outcome]) -> list[tuple[int, str]]:
    """How often each error text was met, the most frequent first."""
    counted = collections.Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    return [(count, text) for text, count in counted.most_common()]


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each of the first distinct errors, and one that says how many more there are."""
    errors = distinct_errors(outcomes)
    found = [f"{count} of {len(outcomes)} requests: {text}" for count, text in errors[:SHOWN_ERRORS]]
    rest = sum(count for count, _ in errors[SHOWN_ERRORS:])
    return [*found, f"{rest} requests: {len(errors) - SHOWN_ERRORS} other errors"] if rest else found
