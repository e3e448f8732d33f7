"""The metrics behind `GET /metrics`, under the prefix `mini_engine:`, by vLLM's names where it has the same metric.
Those without the prefix are named like those of other servers, as vLLM's are.

Every API server counts into files of its own (`metrics_files.py`), and whichever of them is asked sums over all.
Without such files, as in tests, the metrics are this process's own. Label values are created at 0, so that a metric can
be read before its first event. Knows nothing of HTTP.
"""

import bisect
import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    multiprocess,
)
from prometheus_client import values as value_classes
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mini_engine.launch.metrics_files import DIRECTORY_VARIABLE, NUMBER_VARIABLE
from mini_engine.messages import EngineStats, FinishReason, TransportName

TITLE = b"mini-engine: "  # at the beginning of a process's title
REGISTRY = CollectorRegistry()
if NUMBER_VARIABLE in os.environ:  # else prometheus_client would number the files by process id
    value_classes.ValueClass = value_classes.MultiProcessValue(lambda: os.environ[NUMBER_VARIABLE])

# Why tensors did not take the chosen transport. Of a request: its CUDA tensors were copied through the host, for lack
# of a staging slot, or since they lie on several devices. Of an item, which bypasses the store: no room there, another
# API server is writing it, or it is too large; or it was processed on the CPU, since its API server has no room for it
# on its device.
FALLBACK_REASONS = ("cuda_ipc", "store_full", "store_busy", "store_oversize", "processor_memory")

# Why requests were refused with 429, see `http/admission.py`; and with 503, since there were more than
# --max-connections, or the host is out of something.
RejectionReason = Literal["queued_requests", "inflight_bodies", "inflight_media", "connections", "host"]

# Why a media decoder process exited: it crashed, exceeded its time or its memory, was killed from outside, did not stop
# when its job was cancelled, or was one more than the pool keeps.
DecoderEnding = Literal["crash", "timeout", "memory", "killed", "cancelled", "surplus"]

TRANSPORTS = (*get_args(TransportName), "shm_store")

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_E2E_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
_STAGE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_STEP_SIZES = tuple(float(1 << power) for power in range(15))
_SIZES = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


def _counter(name: str, help: str, label: str | None = None, label_values: Iterable[str] = ()) -> Counter:
    """The `label_values` are created at 0."""
    counter = Counter(f"mini_engine:{name}", help, [label] if label else [], registry=REGISTRY)
    for value in label_values:
        counter.labels(value)
    return counter


def _gauge(name: str, help: str, mode: Literal["livesum", "livemax", "livemostrecent"], *labels: str) -> Gauge:
    return Gauge(f"mini_engine:{name}", help, labels, multiprocess_mode=mode, registry=REGISTRY)


def _engine_gauge(name: str, help: str, *labels: str) -> Gauge:
    """A metric of each engine: the value of the API server that heard from it last counts."""
    return _gauge(name, help, "livemostrecent", "engine", *labels)


def _histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"mini_engine:{name}", help, buckets=buckets, registry=REGISTRY)


def _stage(name: str, help: str) -> Histogram:
    return _histogram(f"request_{name}_time_seconds", f"{help}, per successful request.", _STAGE_BUCKETS)


# --- set by API servers -----------------------------------------------------------------------------------------------

ipc_messages_total = _counter("ipc_messages_total", "Media tensors sent, once per rank.", "transport", TRANSPORTS)
ipc_bytes_total = _counter("ipc_bytes_total", "Bytes of media tensors sent, once per rank.", "transport", TRANSPORTS)
ipc_fallbacks_total = _counter(
    "ipc_fallbacks_total", "Requests or items that took a fallback transport.", "reason", FALLBACK_REASONS
)
ipc_buffered_bytes = _gauge("ipc_buffered_bytes", "Bytes of media tensors reserved or in transfer.", "livesum")
ipc_buffered_tensors = _gauge("ipc_buffered_tensors", "Media tensors in transfer.", "livesum")
mm_tensor_ipc_info = _gauge(
    "mm_tensor_ipc_info", "1 for the transport to an engine, and why.", "livemax", "engine", "transport", "reason"
)
mm_cache_queries_total = _counter("mm_cache_queries_total", "Media items looked up.", "engine")
mm_cache_hits_total = _counter(
    "mm_cache_hits_total", "Media items whose patches or embeddings the engine had: not decoded.", "engine"
)
media_named_hits_total = _counter("media_named_hits_total", "Media items found by their names: nothing was fetched.")
mm_store_fragmented_total = _counter("mm_store_fragmented_total", "Media items stored in several extents.")
media_decodes_total = _counter("media_decodes_total", "Images and videos decoded and processed.")
media_decoder_exits_total = _counter(
    "media_decoder_exits_total",
    "Media decoder processes that exited or were killed.",
    "reason",
    get_args(DecoderEnding),
)
inflight_media_bytes = _gauge(
    "inflight_media_bytes", "Bytes of encoded media reserved for requests, and of decoded frames.", "livesum"
)
requests_rejected_total = _counter(
    "requests_rejected_total", "Requests refused: 429, or 503 (connections, host).", "reason", get_args(RejectionReason)
)
http_requests_total = Counter(
    "http_requests_total", "Responses by the path of their route.", ["handler", "method", "status"], registry=REGISTRY
)
_SUCCESS = "Finished requests; `error`: with a 5xx, also in a stream."
request_success_total = _counter("request_success_total", _SUCCESS, "finished_reason", get_args(FinishReason))
time_to_first_token_seconds = _histogram("time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS)
inter_token_latency_seconds = _histogram(
    "inter_token_latency_seconds", "Time between tokens of a choice; tokens sent together share it.", _TOKEN_BUCKETS
)
e2e_request_latency_seconds = _histogram(
    "e2e_request_latency_seconds", "Time from a request's arrival to its last token.", _E2E_BUCKETS
)
request_prompt_tokens = _histogram("request_prompt_tokens", "Prompt tokens per successful request.", _SIZES)
request_generation_tokens = _histogram("request_generation_tokens", "Tokens generated per successful request.", _SIZES)
request_max_num_generation_tokens = _histogram(
    "request_max_num_generation_tokens", "Tokens of the longest choice per successful request.", _SIZES
)
request_params_max_tokens = _histogram(
    "request_params_max_tokens", "Tokens that a choice might have, per successful request.", _SIZES
)
request_time_per_output_token_seconds = _histogram(
    "request_time_per_output_token_seconds", "Mean time between tokens per successful request.", _TOKEN_BUCKETS
)
# The stages of `protocol/request_clock.py`.
stage_seconds = {
    "fetch": _stage("media_fetch", "Fetching and hashing the media"),
    "admission": _stage("admission", "Queued for admission to media decoding"),
    "media_decode": _stage("media_decode", "Decoding the media, or waiting for it"),
    "process": _stage("media_process", "Running the processor, while no media is decoded"),
    "transport": _stage("transport", "From the placement of the tensors until the engine has accepted the request"),
    "queue": _stage("queue", "Queued in the engine"),
    "encode": _stage("encode", "From the first step until the last media item is encoded"),
    "prefill": _stage("prefill", "From the end of encoding to the first token"),
    "generation": _stage("decode", "From the first token to the last"),
}

# --- of an engine -----------------------------------------------------------------------------------------------------

engine_restarts = _gauge("engine_restarts", "Restarts of the engines (--restart-engine).", "livemax")
_PROCESSES = "1 for the numbers of processes: API servers, engines, ranks of each engine."
_COUNTS = ("api_server_count", "data_parallel_size", "tensor_parallel_size")
parallel_config_info = _gauge("parallel_config_info", _PROCESSES, "livemax", *_COUNTS)
_CACHE = "1 for the KV cache of the engine, of which all ranks have so many blocks."
_CACHE_LABELS = ("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization")
cache_config_info = _gauge("cache_config_info", _CACHE, "livemax", *_CACHE_LABELS)
iteration_tokens_total = _histogram("iteration_tokens_total", "Tokens computed per step of an engine.", _STEP_SIZES)
mm_store_bytes = _engine_gauge(
    "mm_store_bytes", "Bytes of the media cache: all items (used), items with references (pinned), free.", "state"
)
_GAUGES = {  # by field of EngineStats
    "running": _engine_gauge("num_requests_running", "Requests running."),
    "waiting": _engine_gauge("num_requests_waiting", "Requests queued in the engine."),
    "kv_cache_usage": _engine_gauge("kv_cache_usage_perc", "Fraction of the KV blocks that requests hold."),
    "encoder_cache_tokens": _engine_gauge(
        "encoder_cache_tokens", "Media tokens in the encoder cache, reserved ones too."
    ),
    "media_facts": _engine_gauge("media_facts", "Media items whose size in tokens, grid and text are known."),
    "state_snapshots": _engine_gauge("state_snapshots", "Snapshots of recurrent states."),
    "media_references": _engine_gauge("mm_cache_references", "References of unfinished requests to cached media."),
}
_COUNTERS = {  # by field of EngineStats
    "prefix_cache_queries": _counter("prefix_cache_queries_total", "Prompt tokens looked up.", "engine"),
    "prefix_cache_hits": _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", "engine"),
    "encoder_cache_queries": _counter("encoder_cache_queries_total", "Media items looked up.", "engine"),
    "encoder_cache_hits": _counter("encoder_cache_hits_total", "Media items encoded, or being encoded.", "engine"),
    "media_tokens_encoded": _counter("media_tokens_encoded_total", "Media tokens encoded.", "engine"),
    "media_evictions": _counter("mm_cache_evictions_total", "Media items evicted from the cache.", "engine"),
    "media_needed": _counter(
        "media_needed_total", "Requests sent to an engine again: it had evicted embeddings of their media.", "engine"
    ),
    "state_snapshots_taken": _counter("state_snapshots_taken_total", "Snapshots of recurrent states taken.", "engine"),
    "state_snapshot_hits": _counter("state_snapshot_hits_total", "Admissions that began with a snapshot.", "engine"),
    "prompt_tokens": _counter("prompt_tokens_total", "Prompt tokens computed, or found in the prefix cache.", "engine"),
    "generation_tokens": _counter("generation_tokens_total", "Tokens generated.", "engine"),
    "preemptions": _counter("num_preemptions_total", "Preempted requests.", "engine"),
}


class EngineMetrics:
    """One engine's metrics, as it reports them when they are read. Its counters can be read, as 0, from the start.

    `media_capacity`: bytes of its media cache.
    """

    def __init__(self, engine: int, media_capacity: int) -> None:
        label = str(engine)
        self._media_capacity = media_capacity
        self._store = {state: mm_store_bytes.labels(label, state) for state in ("used", "pinned", "free")}
        self._store["free"].set(media_capacity)
        self._gauges = {field: gauge.labels(label) for field, gauge in _GAUGES.items()}
        self._counters = {field: counter.labels(label) for field, counter in _COUNTERS.items()}

    def forget(self) -> None:
        """The engine is gone, and all that it held."""
        self.update(EngineStats())

    def update(self, stats: EngineStats) -> None:
        """Set the gauges, and add what has happened since the engine last reported."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        self._store["used"].set(stats.media_bytes)
        self._store["pinned"].set(stats.media_bytes_pinned)
        self._store["free"].set(max(0, self._media_capacity - stats.media_bytes))
        for name, counter in self._counters.items():
            if events := getattr(stats, name):  # spares a write to the file
                counter.inc(events)
        for tokens, steps in stats.step_tokens.items():  # `observe` is for a step at a time
            iteration_tokens_total._sum.inc(tokens * steps)
            bounds = iteration_tokens_total._upper_bounds
            iteration_tokens_total._buckets[bisect.bisect_left(bounds, tokens)].inc(steps)


def _registry() -> CollectorRegistry:
    """What collects the metrics of all API servers."""
    if DIRECTORY_VARIABLE not in os.environ:
        return REGISTRY
    os.listdir(os.environ[DIRECTORY_VARIABLE])  # raises OSError, where the collector would find no files
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return registry


def samples() -> dict[str, list[float]]:
    """The values of each metric over all API servers by its name without prefix: one for each of its labels' values."""
    values: dict[str, list[float]] = {}
    for family in _registry().collect():
        for sample in family.samples:
            values.setdefault(sample.name.removeprefix("mini_engine:"), []).append(sample.value)
    return values


class _Exposed(Collector):
    """The metrics of all API servers, with the label `model_name`, which no file has to hold; and `process_*` of the
    supervisor, which starts each API server, and of the processes that it has started, by the names that `ps` shows."""

    def __init__(self, model_name: str):
        self._label = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        for family in _registry().collect():
            if family.name.startswith("mini_engine:"):
                family.samples = [sample._replace(labels=self._label | sample.labels) for sample in family.samples]
            yield family
        families: dict[str, Metric] = {}
        for name, pid in _processes().items():
            for family in ProcessCollector(pid=pid.__index__, registry=None).collect():
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [sample._replace(labels={"process": name}) for sample in family.samples]
        yield from families.values()


def _processes() -> dict[str, int]:
    supervisor = os.getppid()
    pids, children = {"supervisor": supervisor}, Path(f"/proc/{supervisor}/task/{supervisor}/children")
    for pid in children.read_text().split() if children.exists() else ():  # a kernel may have no such file
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just exited
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
            if title.startswith(TITLE):
                pids[title.removeprefix(TITLE).rstrip(b"\0").decode()] = int(pid)
    return pids


def exposition(model_name: str) -> bytes:
    """All metrics in Prometheus's text format, summed over the API servers. Raises OSError: they cannot be read."""
    return generate_latest(_Exposed(model_name))
