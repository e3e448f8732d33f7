"""The number of engines and threads, as a table of models and cores; `tests/e2e/test_start.py` has a server."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.runner import CONFIGS
from mini_engine.config import BUNDLED_MODEL, EngineConfig
from mini_engine.launch.cli import parse
from mini_engine.launch.plan.parallelism import choose_parallelism, on_cores
from mini_engine.model.config import ModelConfig

TINY = ModelConfig.from_dir(BUNDLED_MODEL)  # 0.8 MiB a layer
TWO_B = ModelConfig.from_dict(json.loads((CONFIGS / "Qwen2-VL-2B-Instruct.json").read_text()))  # 89 MiB
HALF_B = dataclasses.replace(  # 25 MiB
    TINY, dtype="bfloat16", text=dataclasses.replace(TINY.text, hidden_size=1024, intermediate_size=4096)
)


@pytest.mark.parametrize(
    ("model", "flags", "omp_threads", "expected"),
    [
        (TINY, "", 0, {1: (1, 1), 2: (2, 1), 4: (4, 1), 8: (8, 1), 128: (8, 1)}),
        (HALF_B, "", 0, {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 8: (4, 2)}),
        (TWO_B, "", 0, {1: (1, 1), 2: (1, 2), 4: (1, 4), 8: (1, 8), 32: (4, 8)}),
        (TWO_B, "--dtype float32", 0, {8: (1, 8), 32: (2, 16)}),
        (TWO_B, "--quantization int4", 0, {2: (1, 2), 8: (4, 2)}),
        (TINY, "-dp 1", 0, {2: (1, 1), 8: (1, 1)}),
        (TWO_B, "-dp 2", 0, {1: (2, 1), 2: (2, 1), 8: (2, 4)}),
        (TINY, "-tp 2", 0, {2: (1, 1), 8: (4, 1)}),
        (TWO_B, "-tp 2", 0, {1: (1, 1), 2: (1, 1), 8: (1, 4)}),
        (TINY, "", 2, {2: (1, 2), 8: (4, 2)}),
        (TWO_B, "", 1, {2: (1, 1), 8: (1, 1)}),
    ],
)
def test_engines_and_threads_by_cores(model, flags, omp_threads, expected):
    config = parse(flags.split(), {})
    chosen = {cores: on_cores(config, model, omp_threads, cores, memory=1 << 40) for cores in expected}
    assert {cores: (choice.engines, choice.threads) for cores, choice in chosen.items()} == expected


def test_engines_fit_into_half_of_the_memory():
    assert on_cores(EngineConfig(), TINY, 0, cores=16, memory=4 << 30).engines == 3
    assert on_cores(EngineConfig(), TWO_B, 0, cores=128, memory=12 << 30).engines == 1


def test_what_is_given_counts(monkeypatch):
    monkeypatch.setattr("mini_engine.launch.plan.parallelism.usable_cores", lambda: 4)
    for flags, given, expected in (
        ("--device cpu", "x", (4, 1, 256 << 20)),
        ("--device cpu --kv-cache-memory-bytes 5", "2", (2, 2, 5)),
        ("--device cpu -dp 1", "0", (1, 1, 1 << 30)),
        ("--device cuda", "", (1, 3, 1 << 30)),
        ("--device cuda -tp 3", "7", (1, 7, 1 << 30)),
    ):
        config = parse(flags.split(), {})
        chosen = choose_parallelism(config, TINY, given)
        settled = dataclasses.replace(config, data_parallel_size=chosen.engines)
        assert (settled.data_parallel_size, chosen.threads, settled.cpu_cache_bytes) == expected, flags


def test_auto_is_one_engine_where_there_may_be_a_gpu(monkeypatch, tmp_path: Path):
    monkeypatch.setattr("mini_engine.launch.plan.parallelism.usable_cores", lambda: 4)
    for gpus, engines in (([tmp_path], 1), ([tmp_path / "none"], 4)):
        monkeypatch.setattr("mini_engine.launch.plan.parallelism.GPUS", gpus)
        assert choose_parallelism(EngineConfig(), TINY, "").engines == engines
