"""The default sizes of caches on a CPU."""

import dataclasses
import json

import pytest

from benchmarks.runner import CONFIGS
from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.launch.cli import parse
from mini_engine.launch.plan import parallelism
from mini_engine.launch.plan.memory_plan import API_SERVER_BYTES, check_in_worker, settle_memory
from mini_engine.messages import MediaCachePlan
from mini_engine.model.config import ModelConfig

GIB = 1 << 30
QWEN3_4B, RECURRENT_4B = (
    ModelConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))
    for name in ("Qwen3-VL-4B-Instruct", "Qwen3.5-4B")
)
DEMO = ModelConfig.from_dir(BUNDLED_MODEL)
PROCESSES = parallelism.ENGINE_BYTES + API_SERVER_BYTES
TOKEN_BYTES = 2 * 36 * 8 * 128 * 2  # of Qwen3-VL-4B


@pytest.fixture(autouse=True)
def cpu_with_bfloat16(monkeypatch):
    monkeypatch.setattr(parallelism, "is_x86_without_bfloat16", lambda: False)


@pytest.mark.parametrize(
    ("model", "flags", "free", "expected"),
    [
        (DEMO, "", 20, None),  # 1 GiB holds a request
        (QWEN3_4B, "", 64, 65536 * TOKEN_BYTES),
        (QWEN3_4B, "-tp 2", 64, 65536 * TOKEN_BYTES // 2),
        (QWEN3_4B, "--max-model-len 8191", 64, 8192 * TOKEN_BYTES),
        (QWEN3_4B, "--max-model-len 100", 64, None),
        (QWEN3_4B, "", 12, None),
        (QWEN3_4B, "", 10, (10 * GIB - QWEN3_4B.weight_bytes(2) - PROCESSES) * 2 // 3),
        (QWEN3_4B, "-asc 2", 10, (10 * GIB - QWEN3_4B.weight_bytes(2) - PROCESSES - API_SERVER_BYTES) * 2 // 3),
        (QWEN3_4B, "--kv-cache-memory-bytes 7", 64, 7),
        (QWEN3_4B, "--device cuda", 64, None),
        (RECURRENT_4B, "", 64, 65536 * 2 * 8 * 4 * 256 * 2 * 4 // 3),
    ],
)
def test_the_kv_cache_holds_a_request_if_there_is_room(model, flags, free, expected):
    config, line = settle_memory(parse(flags.split(), {}), model, MediaCachePlan("shm", 4 * GIB, ""), free * GIB)
    assert config.kv_cache_memory_bytes == expected
    assert bool(line) == (flags not in ("--kv-cache-memory-bytes 7", "--device cuda"))


def test_the_kv_cache_fits_into_a_small_container():
    """Beside 0.7 GiB for the processes, and a media cache that takes only what is free."""
    config, _ = settle_memory(EngineConfig(), DEMO, MediaCachePlan("shm", GIB // 4, ""), GIB)
    assert 0.19 * GIB < config.kv_cache_memory_bytes < 0.21 * GIB
    flags = ["--data-parallel-size", "2", "--kv-cache-memory-bytes", "7"]
    with pytest.raises(ConfigError, match="^out of memory: 1.0 GiB .* 2 engine.s. and 1 API server.s. need 1.2 GiB"):
        settle_memory(parse(flags, {}), DEMO, MediaCachePlan("off", 0, ""), GIB)


@pytest.mark.parametrize(("flags", "free"), [("", 21), (f"--kv-cache-memory-bytes {9 * GIB - 1}", 64)])
def test_a_kv_cache_too_small_for_max_model_len_is_an_error_before_weights_are_loaded(flags, free):
    media, fitting = MediaCachePlan("off", 0, ""), ["--max-model-len", "50000", *flags.split()]
    settle_memory(parse(fitting, {}), QWEN3_4B, media, free * GIB)
    with pytest.raises(ConfigError, match=r"^--max-model-len: 65536 tokens need 9\.00 GiB of KV cache"):
        settle_memory(parse([*fitting, "--max-model-len", "65536"], {}), QWEN3_4B, media, free * GIB)


def test_a_settled_size_is_not_refused_by_the_worker(monkeypatch):
    """Recurrent states are memory only once they are used: the size counts on that."""
    free = RECURRENT_4B.weight_bytes(2) + PROCESSES + (100 << 20)
    config, _ = settle_memory(parse(["--device", "cpu"], {}), RECURRENT_4B, MediaCachePlan("off", 0, ""), free)
    check_in_worker(config, RECURRENT_4B, "cpu", free)
    monkeypatch.setattr(parallelism, "has_gpu", lambda: True)  # which torch cannot use
    with pytest.raises(ConfigError, match="does not fit"):
        check_in_worker(dataclasses.replace(config, device="auto"), RECURRENT_4B, "cpu", free)


@pytest.mark.parametrize(
    ("flag", "fitting"),
    [("--kv-cache-memory-bytes", 5 * GIB), ("--num-gpu-blocks-override", 5 * GIB // (8 * TOKEN_BYTES))],
)
def test_the_kv_cache_of_a_flag_must_fit_beside_the_weights(flag, fitting):
    free, no_cache = QWEN3_4B.weight_bytes(2) + 10 * GIB, MediaCachePlan("off", 0, "")
    config, too_large = (parse(["-tp", "2", flag, str(size)], {}) for size in (fitting, fitting + 1))
    assert settle_memory(config, QWEN3_4B, no_cache, free) == (config, "")
    with pytest.raises(ConfigError, match=f"^{flag}: a KV cache of 5.0 GiB for each of 2 worker.s. does not fit"):
        settle_memory(too_large, QWEN3_4B, no_cache, free)


@pytest.mark.parametrize(("engines", "packs_head"), [(1, False), (2, False), (2, True)])
def test_engines_divide_two_thirds_of_what_is_left(engines, packs_head, monkeypatch):
    """Each has its own weights; a tied head that is packed is there twice."""
    monkeypatch.setattr(parallelism, "is_x86_without_bfloat16", lambda: packs_head)
    config, free = EngineConfig(data_parallel_size=engines), 20 * GIB * engines
    config, line = settle_memory(config, QWEN3_4B, MediaCachePlan("shm", GIB, ""), free)
    weights, embeddings = QWEN3_4B.weight_bytes(2, packs_head=packs_head), 65536 * QWEN3_4B.vision.row_size * 2
    assert weights == QWEN3_4B.weight_bytes(2) + packs_head * 151936 * 2560 * 2
    assert config.kv_cache_memory_bytes == (free // engines - weights - GIB - embeddings) * 2 // 3
    assert f"weights {engines * weights / GIB:.1f}" in line
    assert "--max-model-len allows up to 262144 tokens" in line
