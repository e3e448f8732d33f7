"""How `serve.py` starts, or refuses to: command lines for other engines, and unusable settings."""

import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch

from mini_engine.config import BUNDLED_MODEL
from mini_engine.launch.cli import parse
from mini_engine.matmul import in_float32
from mini_engine.matmul.linear import LEAST_PACKED
from tests.support.client import answers_of, ask_small, ask_video
from tests.support.hub_cache import put_in_cache
from tests.support.processes import descendants, eventually
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


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A server by a new interpreter, with default flags, on two cores, whatever there are; in a directory with a file
    that is named as a module of the library. Its stdout is closed. From when it serves, the pipe of its log is not
    read."""
    folder, everywhere = tmp_path_factory.mktemp("folder"), os.sched_getaffinity(0)
    (folder / "queue.py").write_text("raise ImportError('the working directory is not searched')")
    flags = ["-dp", "auto", "--device", "cpu", "--enable-log-requests"]
    server = RunningServer(*flags, environ={"OMP_NUM_THREADS": ""})
    unread = 'cd "$0"; exec "$@" 2> >(sed -u "/ serving /q"; exec sleep 600) >&-'
    server.command = ["bash", "-c", unread, str(folder), *server.command]
    os.sched_setaffinity(0, sorted(everywhere)[:2])
    try:
        with server:
            yield server
    finally:
        os.sched_setaffinity(0, everywhere)


def test_default_flags_start_an_engine_per_core_for_a_small_model(fresh):
    question, cores = ask_video(1), len(os.sched_getaffinity(0))
    assert fresh.ask(question.text, question.urls) == question.answer
    workers = [name for name in fresh.pids() if name.startswith("worker")]
    assert sorted(workers) == [f"worker {engine}.0" for engine in range(cores)]
    assert fresh.log.count("on cpu with 1 thread(s)") == cores
    assert f"supervisor | {cores} engine(s) x 1 worker(s) x 1 thread(s)" in fresh.log
    assert "in each engine, 4.0 requests of 65,536 tokens" in fresh.log


def test_processes_import_only_what_they_need(fresh):
    """The supervisor has imported what API servers and workers share."""
    maps = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in fresh.pids().items()}
    assert {name.partition(" ")[0] for name in maps} == {"api", "core", "worker", "supervisor"}
    for name, text in maps.items():
        assert ("libtorch" in text) is (not name.startswith("core")), name
        assert "libav" not in text, name  # FFmpeg is loaded in decoders only


def test_unread_log_blocks_no_process(fresh):
    """Nor does one without a reader. The server's last test."""
    question = ask_small(33_003)
    fresh.fill_log()
    assert fresh.ask(question.text, question.urls) == question.answer
    family = descendants(fresh.process.pid)
    (reader,) = [pid for pid in family if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
    os.kill(reader, signal.SIGKILL)
    assert fresh.ask(question.text, question.urls) == question.answer
    assert fresh.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [  # by the process that finds it
        pytest.param(["--mm-processor-cache-gb", "100000"], "--mm-processor-cache-gb: 100000 GiB", id="the supervisor"),
        pytest.param(["--block-size", "999999999"], "bytes for the KV cache, but one block needs", id="a worker"),
        pytest.param(
            ["--max-model-len", "60000", "--num-gpu-blocks-override", "4"],
            "--max-model-len: the KV cache holds",
            id="core",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--mm-processor-kwargs", '{"size": {"x": 1}}'],
            "--mm-processor-kwargs: Object contains unknown field `x` - at `$.size`; it takes ",
            id="an API server",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_settings_refused_by_a_process_fail_the_start_in_one_line(flags, said):
    lines = refused(RunningServer(*flags)).splitlines()
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


@pytest.mark.skipif(not in_float32.is_x86_without_bfloat16(), reason="this CPU multiplies bfloat16 as it is")
def test_weights_are_packed_while_the_server_answers(tmp_path):
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = LEAST_PACKED // config["text_config"]["hidden_size"]  # so the head is packed
    (folder / "config.json").write_text(json.dumps(config))
    with RunningServer(str(folder), "--load-format", "dummy", "--dtype", "bfloat16") as server:

        def check() -> None:
            server.ask("What is this?", [], max_tokens=4)
            assert "weights packed: 0.00 GB" in server.log

        eventually(check)
        server.ask("And this?", [], max_tokens=4)
