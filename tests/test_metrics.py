"""Metrics over several processes, as API servers count them."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mini_engine import metrics
from mini_engine.metrics_files import FILE_BYTES, forget_gauges, make_files
from tests.shortages import no_descriptors

COUNT = """
from mini_engine import metrics
from mini_engine.api.timings import RequestClock
from mini_engine.messages import EngineStats, EngineTimes
metrics.ipc_messages_total.labels("torch_shm").inc(3)
metrics.ipc_buffered_bytes.set(100)
metrics.ipc_buffered_tensors.set(3)
engine = metrics.EngineMetrics(0, 1000)
metrics.EngineMetrics(1, 1000)
engine.update(EngineStats({running}, 0, 2, 8, 30, 700, 200, 3, 1.5, 10, 4, 3, 2, 1, 6))
engine.update(EngineStats({running}, 0, 2, 8, 30, 700, 200, 3, 1.5))
clock = RequestClock()
clock.tokens(10, 2)
clock.tokens(10, 3)
clock.end("stop", EngineTimes(0, 1, 1.5, 1.75, 100))
clock.end("abort")
"""


def run(code: str, directory: Path, number: int = 0) -> str:
    """What `code` prints in a process that counts in the files of `number`."""
    make_files(directory, number)
    code = f"from mini_engine.metrics_files import count_into; count_into({str(directory)!r}, {number})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_metrics_of_all_processes_are_summed(tmp_path: Path) -> None:
    run(COUNT.format(running=5), tmp_path)
    show = COUNT.format(running=2) + "print(metrics.exposition().decode())"
    lines = run(show, tmp_path, 1).splitlines()
    for line in (
        'mini_engine:ipc_messages_total{transport="torch_shm"} 6.0',
        'mini_engine:ipc_messages_total{transport="direct_rpc"} 0.0',
        'mini_engine:ipc_fallbacks_total{reason="lost"} 0.0',
        'mini_engine:num_requests_running{engine="0"} 2.0',
        'mini_engine:kv_cache_usage_perc{engine="0"} 0.25',
        'mini_engine:encoder_cache_tokens{engine="0"} 30.0',
        'mini_engine:prefix_cache_queries_total{engine="0"} 20.0',
        'mini_engine:prefix_cache_hits_total{engine="0"} 8.0',
        'mini_engine:encoder_cache_queries_total{engine="0"} 6.0',
        'mini_engine:encoder_cache_hits_total{engine="0"} 4.0',
        'mini_engine:num_preemptions_total{engine="0"} 2.0',
        'mini_engine:num_preemptions_total{engine="1"} 0.0',
        'mini_engine:mm_cache_evictions_total{engine="0"} 12.0',
        'mini_engine:mm_store_bytes{engine="0",state="used"} 700.0',
        'mini_engine:mm_store_bytes{engine="0",state="pinned"} 200.0',
        'mini_engine:mm_store_bytes{engine="0",state="free"} 300.0',
        'mini_engine:mm_store_bytes{engine="1",state="free"} 1000.0',
        'mini_engine:mm_cache_references{engine="0"} 3.0',
        'mini_engine:mm_cache_oldest_seconds{engine="0"} 1.5',
        "mini_engine:ipc_buffered_bytes 200.0",
        "mini_engine:ipc_buffered_tensors 6.0",
        "mini_engine:prompt_tokens_total 20.0",
        "mini_engine:generation_tokens_total 10.0",
        'mini_engine:request_success_total{finished_reason="stop"} 2.0',
        'mini_engine:request_success_total{finished_reason="abort"} 0.0',
        "mini_engine:time_to_first_token_seconds_count 2.0",
        "mini_engine:inter_token_latency_seconds_count 6.0",
        "mini_engine:e2e_request_latency_seconds_count 2.0",
        "mini_engine:request_queue_time_seconds_sum 2.0",
        "mini_engine:request_encode_time_seconds_sum 1.0",
        "mini_engine:request_prefill_time_seconds_sum 0.5",
        "mini_engine:request_decode_time_seconds_sum 196.5",
        "mini_engine:request_admission_time_seconds_count 2.0",
        "mini_engine:request_media_fetch_time_seconds_count 2.0",
        "mini_engine:request_media_decode_time_seconds_count 2.0",
        "mini_engine:request_media_process_time_seconds_count 2.0",
        "mini_engine:request_transport_time_seconds_count 2.0",
    ):
        assert line in lines


def test_an_import_makes_no_files(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    code = "from mini_engine import metrics; metrics.media_decodes_total.inc(); "
    code += "print(metrics.samples()['media_decodes_total'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ | {"PYTHONPATH": os.getcwd()},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == "[1.0]\n" and not list(tmp_path.iterdir())


MANY = """
from mini_engine import metrics
for engine in range(64):
    metrics.EngineMetrics(engine, 1000)
    metrics.mm_tensor_ipc_info.labels(str(engine), "torch_shm", "x" * 500).set(1)
"""


def test_the_files_have_the_size_that_was_set_aside_however_many_engines_there_are(tmp_path: Path) -> None:
    run(MANY, tmp_path)
    assert {path.name.rpartition("_")[0]: path.stat().st_size for path in tmp_path.iterdir()} == FILE_BYTES
    assert all(512 * path.stat().st_blocks >= path.stat().st_size for path in tmp_path.iterdir())
    used = {path.name.rpartition("_")[0] for path in tmp_path.iterdir() if path.read_bytes()[:4] != bytes(4)}
    assert used == FILE_BYTES.keys()


TWO = """
from mini_engine import metrics
metrics.prompt_tokens_total.inc()
metrics.EngineMetrics(0, 1000)
print(metrics.samples()["prompt_tokens_total"], metrics.samples()["mm_store_bytes"])
"""


def test_a_process_counts_on_in_the_files_of_the_one_before_it(tmp_path: Path) -> None:
    assert run(TWO, tmp_path, 3) == "[1.0] [1000.0]\n"
    forget_gauges(tmp_path, 3)
    nothing = "from mini_engine import metrics\nprint(metrics.samples().get('mm_store_bytes'))"
    assert run(nothing, tmp_path, 4) == "None\n"
    assert run(TWO, tmp_path, 3).startswith("[2.0] ")


def test_no_file_is_left_where_there_is_no_room(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, hard))
    try:
        with pytest.raises(OSError, match="no room in TMPDIR for the metrics of an API server .File too large"):
            make_files(tmp_path, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_metrics_that_cannot_be_read_are_no_empty_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scraper would take it for a server that counts nothing any more."""
    run(COUNT.format(running=5), tmp_path)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        metrics.exposition()
    assert b"num_requests_running" in metrics.exposition()
