"""How `serve.py` starts, or refuses to: command lines that other engines' users bring, and settings of no use."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
import torch

from mini_engine.cli import parse
from mini_engine.config import BUNDLED_MODEL
from tests.e2e.asked import ask_video
from tests.e2e.running_server import ROOT, RunningServer, environment

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


def test_the_published_command_lines_are_understood():
    queue, cache = (parse(published(name), {}) for name in PUBLISHED)
    assert queue.media_io_kwargs == {"video": {"num_frames": 10}}
    assert queue.mm_processor_kwargs == {"size": {"shortest_edge": 100352, "longest_edge": 151200}}
    assert (queue.api_server_count, queue.enforce_eager, queue.enable_prefix_caching) == (3, False, False)
    assert (cache.mm_processor_cache_type, cache.tensor_parallel_size, cache.max_model_len) == ("shm", 4, 16384)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "right"), [("tensor queue", 4), ("shared-memory cache", 7)])
def test_the_published_command_lines_serve(name, right):
    """The first asks for larger frames than those that the bundled model has learned from."""
    asked = [ask_video(50 + seed) for seed in range(8)]
    with RunningServer(*published(name)) as server:
        answers = [server.ask(one.text, one.urls) for one in asked]
        server.stop()  # so that all it has to log is there
        useless = [line for line in server.log.splitlines() if "no effect here" in line]
        logged = server.log.count("POST /v1/chat/completions: 200")
    assert sum(one.answer == answer for one, answer in zip(asked, answers, strict=True)) >= right, answers
    if name == "tensor queue":
        assert logged == len(asked)
        assert len(useless) == (not torch.cuda.is_available())
        assert all("--gpu-memory-utilization" in line for line in useless)
    else:
        assert logged == len(useless) == 0


# Who finds it, the flags, and what is said.
REFUSED = {
    "a worker": (["--block-size", "999999999", "-tp", "2"], "bytes for the KV cache, but one block needs"),
    "a device": (["--device", "cuda", "-tp", "2"], "choose --device cpu"),
    "a size": (["--kv-cache-memory-bytes", "1"], "--kv-cache-memory-bytes 1 leaves 1 bytes for the KV cache"),
    "too many blocks": (["--num-gpu-blocks-override", "1000000000"], "--num-gpu-blocks-override: a KV cache of"),
    "the core": (["--max-model-len", "60000", "--num-gpu-blocks-override", "4"], "--max-model-len: the KV cache holds"),
    "an API server": (["--mm-processor-kwargs", '{"x": 1}'], "--mm-processor-kwargs has no x; "),
}


@pytest.mark.parametrize(
    "case", [name if name == "a worker" else pytest.param(name, marks=pytest.mark.slow) for name in REFUSED]
)
def test_what_a_process_finds_of_no_use_ends_the_start_in_one_line(case):
    flags, said = REFUSED[case]
    if case == "a device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, "serve.py", "--host", "127.0.0.1", "--port", "0", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment(flags))
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if " ERROR " in line]
    assert said in line and "start failed: " in line and "Traceback" not in ended.stderr
