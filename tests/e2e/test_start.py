"""How `serve.py` starts, or refuses to: command lines for other engines, and unusable settings."""

from __future__ import annotations

import os
import shlex

import pytest
import torch

from mini_engine.config import BUNDLED_MODEL
from mini_engine.launch.cli import parse
from tests.support.client import answers_of, ask_video
from tests.support.hub_cache import put_in_cache
from tests.support.running_server import RunningServer, refused

# As published, but for the program's name.
PUBLISHED = {
    "tensor queue": """MODEL --limit-mm-per-prompt '{"video": 1}' --allowed-local-media-path / --enable-log-requests
        --disable-log-stats --mm-processor-cache-gb 0 --trust-remote-code --tensor-parallel-size 1 --max-model-len 65536
        --gpu-memory-utilization 0.6 --no-enforce-eager --max-num-seqs 64 --no-enable-prefix-caching
        --api-server-count 3 --media-io-kwargs '{"video":{"num_frames":10}}'
        --mm-processor-kwargs '{"size":{"shortest_edge":100352,"longest_edge":151200}}'
        --maximum-concurrent-videos 140""",
    "shared-memory cache": """MODEL --mm_processor_cache_type shm --disable-log-requests --tensor-parallel-size 4
        --max_model_len 16384 --max-num-seqs 32""",
}


def published(name: str) -> list[str]:
    return shlex.split(PUBLISHED[name].replace("MODEL", BUNDLED_MODEL))


def test_published_command_lines_are_parsed():
    queue, cache = (parse(published(name), {}) for name in PUBLISHED)
    assert queue.media_io_kwargs == {"video": {"num_frames": 10}}
    assert queue.mm_processor_kwargs == {"size": {"shortest_edge": 100352, "longest_edge": 151200}}
    assert (queue.api_server_count, queue.enforce_eager, queue.enable_prefix_caching) == (3, False, False)
    assert (cache.mm_processor_cache_type, cache.tensor_parallel_size, cache.max_model_len) == ("shm", 4, 16384)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "right"), [("tensor queue", 4), ("shared-memory cache", 7)])
def test_published_command_lines_start_a_server(name, right):
    """The first asks for larger frames than those that the bundled model has learned from."""
    questions = [ask_video(50 + seed) for seed in range(8)]
    with RunningServer(*published(name)) as server:
        answers = answers_of(server, questions, 1)
        server.stop()  # so that all it has to log is there
        useless = [line for line in server.log.splitlines() if "no effect here" in line]
        logged = server.log.count("POST /v1/chat/completions: 200")
    assert sum(question.answer == answer for question, answer in zip(questions, answers, strict=True)) >= right, answers
    if name == "tensor queue":
        assert logged == len(questions)
        assert len(useless) == (not torch.cuda.is_available())
        assert all("--gpu-memory-utilization" in line for line in useless)
    else:
        assert logged == len(useless) == 0


def test_default_flags_start_an_engine_per_core_for_a_small_model(tmp_path):
    """On two cores, whatever there are; in a directory with a file that is named as a module of the library."""
    (tmp_path / "queue.py").write_text("raise ImportError('the working directory is not searched')")
    everywhere = os.sched_getaffinity(0)
    cores = sorted(everywhere)[:2]
    os.sched_setaffinity(0, cores)
    try:
        with RunningServer("-dp", "auto", "--device", "cpu", environ={"OMP_NUM_THREADS": ""}, cwd=tmp_path) as server:
            workers = [name for name in server.pids() if name.startswith("worker")]
            question = ask_video(1)
            assert server.ask(question.text, question.urls) == question.answer
            assert sorted(workers) == [f"worker {engine}.0" for engine in range(len(cores))]
            assert server.log.count("on cpu with 1 thread(s)") == len(cores)
            assert f"supervisor | {len(cores)} engine(s) x 1 worker(s) x 1 thread(s)" in server.log
            assert "in each engine, 4.0 requests of 65,536 tokens" in server.log
    finally:
        os.sched_setaffinity(0, everywhere)


# By the process that finds it: flags, and what is said.
REFUSED = {
    "the supervisor": (["--mm-processor-cache-gb", "100000"], "--mm-processor-cache-gb: 100000 GiB"),
    "a device": (["--device", "cuda", "-tp", "2"], "--device cuda: no GPU in /dev; choose --device cpu"),
    "memory": (["--device", "cpu", "--kv-cache-memory-bytes", "1T"], "--kv-cache-memory-bytes: a KV cache of 1024."),
    "a worker": (["--block-size", "999999999"], "bytes for the KV cache, but one block needs"),
    "collectives": (["--distributed-backend", "nccl", "-tp", "2"], "--distributed-backend: nccl needs CUDA devices"),
    "core": (["--max-model-len", "60000", "--num-gpu-blocks-override", "4"], "--max-model-len: the KV cache holds"),
    "an API server": (
        ["--mm-processor-kwargs", '{"x": 1}'],
        "--mm-processor-kwargs: Object contains unknown field `x`; it takes ",
    ),
}
FAST = ("the supervisor", "a device", "memory", "a worker")


@pytest.mark.parametrize(
    "case", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in REFUSED]
)
def test_settings_refused_by_a_process_fail_the_start_in_one_line(case):
    flags, said = REFUSED[case]
    if case in ("a device", "collectives") and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    lines = refused(*flags).splitlines()
    (line,) = [line for line in lines if line.startswith("serve.py: ") or " ERROR " in line]
    assert said in line


@pytest.mark.slow
def test_cached_hub_model_in_bfloat16_on_two_workers(tmp_path):
    put_in_cache(tmp_path, "someone/some-model")
    environ = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    with RunningServer("someone/some-model", "--dtype", "bfloat16", "-tp", "2", environ=environ) as server:
        assert server.model == "someone/some-model"
        assert "model loaded: bfloat16" in server.log
        questions = [ask_video(seed) for seed in range(6)]
        assert answers_of(server, questions) == [question.answer for question in questions]
