"""The metrics behind `GET /metrics`, under the prefix `mini_engine:`, by vLLM's names where it has the same metric.

Every API server counts into files of its own (`metrics_files.py`), and whichever of them is asked sums over all.
Without such files, as in tests, the metrics are this process's own. Label values are created at 0, so that a metric can
be read before its first event. Knows nothing of HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal, get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)
from prometheus_client.metrics_core import Metric

from mini_engine.messages import EngineStats, FinishReason, TransportName

CONTENT_TYPE = CONTENT_TYPE_LATEST
REGISTRY = CollectorRegistry()

# Why tensors did not take the chosen transport. A request's: a rank could not use them, and they were sent again. A
# request's CUDA tensors, copied through the host: no staging slot takes them, or they lie on several devices. An
# item's, past the store: no room there, another API server is writing it, or it is too large; and one that was
# processed on the CPU, since its API server has no room for it on its device.
FALLBACK_REASONS = ("lost", "cuda_ipc", "store_full", "store_busy", "store_oversize", "processor_memory")

# Why requests were refused with 429, see `api/admission.py`; and with 503, since the host is out of something.
REJECTION_REASONS = ("queued_requests", "inflight_bodies", "inflight_media", "host")

# Why a media decoder process ended: it crashed, exceeded its time or its memory, was killed from outside, did not stop
# when its job was cancelled, or was one more than the pool keeps.
DECODER_ENDINGS = ("crash", "timeout", "memory", "killed", "cancelled", "surplus")

TRANSPORTS = (*get_args(TransportName), "shm_store")

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_E2E_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)

_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
_SIZES = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STAGE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


def _counter(name: str, help: str, label: str | None = None, values: Iterable[str] = ()) -> Counter:
    """The `values` of its label are created at 0."""
    counter = Counter(f"mini_engine:{name}", help, [label] if label else [], registry=REGISTRY)
    for value in values:
        counter.labels(value)
    return counter


def _gauge(
    name: str, help: str, mode: Literal["livesum", "livemax", "livemostrecent"], labels: Iterable[str] = ()
) -> Gauge:
    return Gauge(f"mini_engine:{name}", help, labels, multiprocess_mode=mode, registry=REGISTRY)


def _engine_gauge(name: str, help: str, labels: Iterable[str] = ()) -> Gauge:
    """A metric of each engine: the value of the API server that heard from it last counts."""
    return _gauge(name, help, "livemostrecent", ["engine", *labels])


def _histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"mini_engine:{name}", help, buckets=buckets, registry=REGISTRY)


def _stage_histogram(name: str, what: str) -> Histogram:
    return _histogram(f"request_{name}_time_seconds", f"{what}, of each request that succeeded.", _STAGE_BUCKETS)


ipc_messages_total = _counter(
    "ipc_messages_total", "Media tensors sent to workers, each rank counted.", "transport", TRANSPORTS
)
ipc_bytes_total = _counter(
    "ipc_bytes_total", "Bytes of media tensors sent, each rank counted.", "transport", TRANSPORTS
)
ipc_fallbacks_total = _counter(
    "ipc_fallbacks_total", "Requests, or items, that could not take the chosen transport.", "reason", FALLBACK_REASONS
)
ipc_buffered_bytes = _gauge(
    "ipc_buffered_bytes", "Bytes of media tensors reserved or sent and not yet consumed by all ranks.", "livesum"
)
ipc_buffered_tensors = _gauge(
    "ipc_buffered_tensors", "Media tensors copied for, or sent to, the ranks and not yet consumed by all.", "livesum"
)
mm_tensor_ipc_info = _gauge(
    "mm_tensor_ipc_info", "1 for the transport in use towards an engine, and why it was chosen.",
    "livemax", ["engine", "transport", "reason"],
)  # fmt: skip
engine_restarts = _gauge(
    "engine_restarts", "How often the engines were restarted after one had died (--restart-engine).", "livemax"
)
num_requests_running = _engine_gauge("num_requests_running", "Requests being computed.")
num_requests_waiting = _engine_gauge("num_requests_waiting", "Requests queued in the engine.")
kv_cache_usage_perc = _engine_gauge(
    "kv_cache_usage_perc",
    "Share of the KV blocks that requests hold; 1 is all. Cached blocks that no request holds are free.",
)
encoder_cache_tokens = _engine_gauge(
    "encoder_cache_tokens", "Media tokens whose embeddings are kept, or have room reserved."
)
prefix_cache_queries_total = _counter(
    "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", "engine"
)
prefix_cache_hits_total = _counter("prefix_cache_hits_total", "Prompt tokens that the prefix cache held.", "engine")
encoder_cache_queries_total = _counter("encoder_cache_queries_total", "Media items needed.", "engine")
encoder_cache_hits_total = _counter(
    "encoder_cache_hits_total", "Media items found encoded, or on the way to be.", "engine"
)
mm_cache_queries_total = _counter("mm_cache_queries_total", "Media items looked up among the cached ones.", "engine")
mm_cache_hits_total = _counter(
    "mm_cache_hits_total", "Media items named by their hash, without decoding, for the engine can read them.", "engine"
)
mm_store_fragmented_total = _counter(
    "mm_store_fragmented_total", "Items written to the media store in several extents, which readers have to gather."
)
mm_cache_evictions_total = _counter("mm_cache_evictions_total", "Cached media dropped to make room.", "engine")
mm_store_bytes = _engine_gauge(
    "mm_store_bytes",
    "Bytes of cached media that the engine can read: all (used), those that requests refer to (pinned), room (free).",
    ["state"],
)
mm_cache_references = _engine_gauge("mm_cache_references", "References of unfinished requests to cached media.")
mm_cache_oldest_seconds = _engine_gauge(
    "mm_cache_oldest_seconds",
    "Since the cached item that is unused for longest was used, when the engine last reported.",
)
num_preemptions_total = _counter("num_preemptions_total", "Preempted requests.", "engine")
request_success_total = _counter(
    "request_success_total", "Requests that ended, by how; error: by a 5xx or an error event.", "finished_reason",
    get_args(FinishReason),
)  # fmt: skip
prompt_tokens_total = _counter("prompt_tokens_total", "Prompt tokens of requests that brought a token.")
generation_tokens_total = _counter("generation_tokens_total", "Tokens delivered.")
time_to_first_token_seconds = _histogram(
    "time_to_first_token_seconds", "From the request's arrival to its first token.", _TTFT_BUCKETS
)
inter_token_latency_seconds = _histogram(
    "inter_token_latency_seconds", "From one token of a choice to its next; tokens that come together share.",
    _TOKEN_BUCKETS,
)  # fmt: skip
e2e_request_latency_seconds = _histogram(
    "e2e_request_latency_seconds", "From the request's arrival to its last token.", _E2E_BUCKETS
)
request_prompt_tokens = _histogram("request_prompt_tokens", "Prompt tokens of each request that succeeded.", _SIZES)
request_generation_tokens = _histogram(
    "request_generation_tokens", "Tokens delivered to each request that succeeded, of all its choices.", _SIZES
)
request_time_per_output_token_seconds = _histogram(
    "request_time_per_output_token_seconds", "Mean time from one token to the next of a choice of each request that "
    "succeeded, where it has two.", _TOKEN_BUCKETS,
)  # fmt: skip
# Where a request's time goes, by the stages of `api/timings.py`; vLLM has the three without another name here.
stage_seconds = {
    "admission": _stage_histogram("admission", "Queued for admission to media decoding"),
    "fetch": _stage_histogram("media_fetch", "Fetching and hashing the media"),
    "media_decode": _stage_histogram("media_decode", "Decoding the media, or waiting for it"),
    "process": _stage_histogram("media_process", "The processor alone, while none of the media is decoded"),
    "transport": _stage_histogram("transport", "From the placing of the tensors until the engine has it all"),
    "queue": _stage_histogram("queue", "Queued in the engine"),
    "encode": _stage_histogram("encode", "From the first step until the last of the media is encoded"),
    "prefill": _stage_histogram("prefill", "From there to the first token"),
    "generation": _stage_histogram("decode", "From the first token to the last"),
}
media_decodes_total = _counter("media_decodes_total", "Images and videos decoded and processed.")
media_decoder_exits_total = _counter(
    "media_decoder_exits_total", "Media decoder processes that exited, or were killed, by reason.", "reason",
    DECODER_ENDINGS,
)  # fmt: skip
inflight_media_bytes = _gauge(
    "inflight_media_bytes",
    "Bytes of encoded images and videos reserved for requests until an engine has taken these over, and of decoded "
    "frames until they are processed.",
    "livesum",
)
requests_rejected_total = _counter(
    "requests_rejected_total", "Requests refused because of overload, or because the host is out of something.",
    "reason", REJECTION_REASONS,
)  # fmt: skip


class EngineMetrics:
    """One engine's metrics, as it reports them when they are read. Its counters can be read, as 0, from the start.

    `media_capacity`: most bytes of cached media that it can read.
    """

    def __init__(self, engine: int, media_capacity: int) -> None:
        label = str(engine)
        self._running = num_requests_running.labels(label)
        self._waiting = num_requests_waiting.labels(label)
        self._kv_usage = kv_cache_usage_perc.labels(label)
        self._encoder_tokens = encoder_cache_tokens.labels(label)
        self._media_capacity = media_capacity
        self._store = {state: mm_store_bytes.labels(label, state) for state in ("used", "pinned", "free")}
        self._store["free"].set(media_capacity)
        self._oldest = mm_cache_oldest_seconds.labels(label)
        self._references = mm_cache_references.labels(label)
        self._counters = {
            "prefix_cache_queries": prefix_cache_queries_total.labels(label),
            "prefix_cache_hits": prefix_cache_hits_total.labels(label),
            "encoder_cache_queries": encoder_cache_queries_total.labels(label),
            "encoder_cache_hits": encoder_cache_hits_total.labels(label),
            "preemptions": num_preemptions_total.labels(label),
            "media_evictions": mm_cache_evictions_total.labels(label),
        }

    def forget(self) -> None:
        """The engine is gone, and all that it held."""
        self.update(EngineStats())

    def update(self, stats: EngineStats) -> None:
        """Set the gauges, and add what has happened since the engine last reported."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._kv_usage.set(stats.kv_blocks_used / max(1, stats.kv_blocks_total))
        self._encoder_tokens.set(stats.encoder_cache_tokens)
        for state, nbytes in (
            ("used", stats.media_bytes),
            ("pinned", stats.media_bytes_pinned),
            ("free", max(0, self._media_capacity - stats.media_bytes)),
        ):
            self._store[state].set(nbytes)
        self._references.set(stats.media_references)
        self._oldest.set(stats.media_oldest_seconds)
        for name, counter in self._counters.items():
            if events := getattr(stats, name):  # spares a write to the file
                counter.inc(events)


class _Files(multiprocess.MultiProcessCollector):
    """The metrics in the files of a directory."""

    def collect(self) -> Iterable[Metric]:
        """All of them. Raises OSError where they cannot be listed: the base class would find that there are none."""
        directory = os.environ["PROMETHEUS_MULTIPROC_DIR"]
        paths = [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(".db")]
        return self.merge(paths, accumulate=True)


def _registry() -> CollectorRegistry:
    """What collects the metrics of all API servers."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return REGISTRY
    registry = CollectorRegistry()
    _Files(registry)
    return registry


def samples() -> dict[str, list[float]]:
    """The values of each metric over all API servers by its name without prefix: one for each of its labels' values."""
    found: dict[str, list[float]] = {}
    for family in _registry().collect():
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("mini_engine:"), []).append(sample.value)
    return found


def exposition() -> bytes:
    """All metrics in Prometheus's text format, summed over the API servers. Raises OSError: they cannot be read."""
    return generate_latest(_registry())
