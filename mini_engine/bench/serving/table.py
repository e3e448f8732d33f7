"""The table that a run prints: vLLM's rows in its order and one for cancelled streams, then the answers, the server's
stages, and the client itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mini_engine.bench.report import table
from mini_engine.bench.serving.figures import Measures

WIDTH = 50
TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
COUNTS: list[tuple[str, str]] = [  # key of the figures -> what the row says
    ("completed", "Successful requests:"),
    ("failed", "Failed requests:"),
    ("cancelled", "Cancelled requests:"),
    ("max_concurrency", "Maximum request concurrency:"),
    ("request_rate", "Request rate configured (RPS):"),
    ("duration", "Benchmark duration (s):"),
    ("total_input_tokens", "Total input tokens:"),
    ("total_output_tokens", "Total generated tokens:"),
    ("request_throughput", "Request throughput (req/s):"),
    ("request_goodput", "Request goodput (req/s):"),
    ("output_throughput", "Output token throughput (tok/s):"),
    ("max_output_tokens_per_s", "Peak output token throughput (tok/s):"),
    ("max_concurrent_requests", "Peak concurrent requests:"),
    ("total_token_throughput", "Total Token throughput (tok/s):"),
]
OPTIONAL = {"max_concurrency", "request_goodput"}  # rows only where there was such a flag


def describe(figures: dict[str, Any], measures: Measures, title: str) -> str:
    """The table."""
    lines = [f" {title} ".center(WIDTH, "=")]
    lines += [
        row(label, value) for key, label in COUNTS if (value := figures.get(key)) is not None or key not in OPTIONAL
    ]
    for metric in measures.metrics:
        short, long = TITLES[metric]
        lines.append(long.center(WIDTH, "-"))
        lines += [row(f"{label} {short} (ms):", figures[f"{key}_{metric}_ms"]) for key, label in statistics(measures)]
    lines.append("=" * WIDTH)
    return "\n".join([*lines, *_answers(figures), *_stages(figures, measures), *_client(figures)])


def statistics(measures: Measures) -> list[tuple[str, str]]:
    """Keys of the figures and their names: mean, median, and the percentiles that were asked for."""
    return [("mean", "Mean"), ("median", "Median"), *((f"p{share:g}", f"P{share:g}") for share in measures.percentiles)]


def row(label: str, value: object) -> str:
    """A line of the table."""
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text}"


def _answers(figures: dict[str, Any]) -> list[str]:
    known = figures["accuracy"]
    if known is None:
        return []
    return [row("Right answers:", f"{known['right']} of {known['known']} ({100 * known['share']:.1f} %)")]


def _stages(figures: dict[str, Any], measures: Measures) -> list[str]:
    if figures["stages_ms"] is None:
        return []
    keys: Sequence[str] = [key for key, _ in statistics(measures)]
    rows = [
        [stage, *(values[key] for key in keys), f"{100 * values['share']:.1f} %"]
        for stage, values in figures["stages_ms"].items()
    ]
    head = ["", *(name.lower() for _, name in statistics(measures)), "share"]
    return ["", "Where the server says the time went (ms):", table(head, rows)]


def _client(figures: dict[str, Any]) -> list[str]:
    client = figures["client"]
    said = (
        f"client: {100 * client['cpu_share']:.0f} % of one core; its loop woke up {client['lag_p99_ms']:.1f} ms late "
        f"(p99), {client['lag_max_ms']:.1f} ms at most"
    )
    lines = ["", said]
    if client["bottleneck"]:
        lines.append("The client was a bottleneck: latencies are its own in part. Give it a core, or less to do.")
    if client["host_busy"]:
        lines.append("The host is busy: the client's loop woke up late, and latencies are longer by as much.")
    others = [counted for counted in figures["tokens_counted_by"] if counted != "server"]
    if others:
        lines.append(f"The server gives no usage: output tokens are counted by {others[0]}, those of prompts are not.")
    return lines
