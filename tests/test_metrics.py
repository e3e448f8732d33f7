"""Metrics over several processes, as API servers count them."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mini_engine import metrics
from mini_engine.http.app import ROUTERS
from mini_engine.http.middleware import COUNTED_METHODS, ENGINE_PATHS
from mini_engine.launch.metrics_files import DIRECTORY_VARIABLE, FILE_BYTES, NUMBER_VARIABLE, forget_gauges, make_files


def run(code: str, directory: Path, number: int = 0) -> str:
    """What `code` prints in a process that counts in the files of `number`."""
    make_files(directory, number)
    environ = {**os.environ, DIRECTORY_VARIABLE: str(directory), NUMBER_VARIABLE: str(number)}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True).stdout


def test_the_metrics_of_all_processes_are_summed(tmp_path: Path) -> None:
    """Counters and histograms; of an engine's gauges the latest value counts."""
    count = """
from mini_engine import metrics
from mini_engine.messages import EngineStats
metrics.ipc_messages_total.labels("torch_shm").inc(3)
metrics.ipc_buffered_bytes.set(100)
engine = metrics.EngineMetrics(0, 1000)
metrics.EngineMetrics(1, 1000)
engine.update(EngineStats({running}, 0, 0.25, 30, 700, 200, 3, 5, 9, 10, 4, media_evictions=6))
engine.update(EngineStats({running}, 0, 0.25, 30, 700, 200, 3, step_tokens={{3: 2, 16: 1}}))
metrics.stage_seconds["queue"].observe(1)
"""
    run(count.format(running=5), tmp_path)
    lines = run(count.format(running=2) + "print(metrics.exposition('m').decode())", tmp_path, 1).splitlines()
    expected = {
        'iteration_tokens_total_bucket{le="2.0"} 0.0',
        'iteration_tokens_total_bucket{le="4.0"} 4.0',
        'iteration_tokens_total_bucket{le="+Inf"} 6.0',
        "iteration_tokens_total_sum 44.0",
        'ipc_messages_total{transport="torch_shm"} 6.0',
        'ipc_messages_total{transport="direct_rpc"} 0.0',
        'ipc_fallbacks_total{reason="cuda_ipc"} 0.0',
        "ipc_buffered_bytes 200.0",
        'num_requests_running{engine="0"} 2.0',
        'kv_cache_usage_perc{engine="0"} 0.25',
        'prefix_cache_queries_total{engine="0"} 20.0',
        'num_preemptions_total{engine="1"} 0.0',
        'mm_cache_evictions_total{engine="0"} 12.0',
        'mm_store_bytes{engine="0",state="pinned"} 200.0',
        'mm_store_bytes{engine="0",state="free"} 300.0',
        "request_queue_time_seconds_sum 2.0",
    }
    with_label = {re.sub(r'{model_name="m"}|,model_name="m"|(?<={)model_name="m",', "", line) for line in lines}
    assert not {f"mini_engine:{line}" for line in expected} - (with_label - {*lines})


def test_an_import_makes_no_files(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    code = "from mini_engine import metrics; metrics.media_decodes_total.inc()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True)
    assert not list(tmp_path.iterdir())


def test_the_files_keep_their_allocated_size_with_64_engines(tmp_path: Path) -> None:
    engine = "metrics.EngineMetrics(engine, 1000)"
    transport = 'metrics.mm_tensor_ipc_info.labels(str(engine), "torch_shm", "x" * 500).set(1)'
    cache = "metrics.cache_config_info.labels(engine, 16, 1234567, True, 0.9).set(1)"
    routes = [route for router in ROUTERS for route in router.routes]
    handlers = [(route.path, method) for route in routes for method in route.methods]
    handlers += itertools.product(("none", *ENGINE_PATHS), (*COUNTED_METHODS, "other"))
    responses = f"[metrics.http_requests_total.labels(*a, f'{{b}}xx') for a in {handlers} for b in range(2, 6)]"
    code = f"{responses}\nfor engine in range(64):\n    {engine}; {transport}; {cache}"
    run(f"from mini_engine import metrics; {code}", tmp_path)
    assert {path.name.rpartition("_")[0]: path.stat().st_size for path in tmp_path.iterdir()} == FILE_BYTES
    assert all(512 * path.stat().st_blocks >= path.stat().st_size for path in tmp_path.iterdir())
    used = {path.name.rpartition("_")[0] for path in tmp_path.iterdir() if path.read_bytes()[:4] != bytes(4)}
    assert used == FILE_BYTES.keys()


def test_a_process_counts_on_in_the_files_of_the_one_before_it(tmp_path: Path) -> None:
    """Whatever it imports first."""
    count = "from mini_engine import metrics; metrics.media_decodes_total.inc(); metrics.EngineMetrics(0, 1000); "
    count += "print(metrics.samples()['media_decodes_total'], metrics.samples()['mm_store_bytes'])"
    assert run("import prometheus_client.multiprocess; " + count, tmp_path, 3) == "[1.0] [1000.0]\n"
    forget_gauges(tmp_path, 3)
    show = "from mini_engine import metrics; print(metrics.samples().get('mm_store_bytes'))"
    assert run(show, tmp_path, 4) == "None\n"
    assert run(count, tmp_path, 3).startswith("[2.0] ")


def test_metrics_that_cannot_be_read_are_not_an_empty_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scraper would take it for a server whose counters were reset."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        metrics.exposition("m")
