"""The command line of `serve.py`: flags, environment variables, what is refused, and `--help`."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mini_engine import config
from mini_engine.cli import parse, settle
from mini_engine.cli_help import EXAMPLES, build_parser
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.config.options import default_of, parse_bytes, parse_count
from mini_engine.config.vllm_flags import NO_EFFECT, NOT_SUPPORTED

ROOT = Path(__file__).parent.parent
FLAG = re.compile("--[a-z][a-z-]*")


def test_no_argument_serves_the_bundled_model():
    settings = parse([], {})
    assert settings == EngineConfig()
    assert settings.model == config.BUNDLED_MODEL
    assert settings.served_names == ["mini-engine-demo"]
    assert EngineConfig(model="/a/model").served_names == ["/a/model"], "as it was given: clients may read it"


def test_a_list_may_come_in_parts_or_as_json():
    assert parse(["--api-key", "a", "b", "--port", "1", "--api-key=c"], {}).api_key == ["a", "b", "c"]
    assert parse([], {"MINI_ENGINE_API_KEY": "a, b"}).api_key == ["a", "b"]
    assert parse(["--allowed-origins", '["https://a", "b"]'], {}).allowed_origins == ["https://a", "b"]
    assert parse([], {"MINI_ENGINE_ALLOWED_ORIGINS": '["a", "b"]'}).allowed_origins == ["a", "b"]
    assert parse(["--allowed-media-domains", "[2606:4700::1]:80"], {}).allowed_media_domains == ["[2606:4700::1]:80"]


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, "auto"),
        (["--enable-multimodal-tensor-ipc"], {}, "torch_shm"),
        (["--disable-multimodal-tensor-ipc"], {}, "direct_rpc"),
        (["--mm-tensor-ipc", "direct_rpc"], {}, "direct_rpc"),
        ([], {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "1"}, "torch_shm"),
        ([], {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "0"}, "direct_rpc"),
        ([], {"MINI_ENGINE_MM_TENSOR_IPC": "direct_rpc"}, "direct_rpc"),
        (["--enable-multimodal-tensor-ipc"], {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "0"}, "torch_shm"),
    ],
)
def test_the_tensor_transport_switch(argv, environ, expected):
    assert parse(argv, environ).mm_tensor_ipc == expected


CUDA = ["--mm-processor-device", "cuda"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--api-key", ""], "--api-key"),
        (["--root-path", "engine"], "--root-path"),
        (["--root-path", "/engine/"], "--root-path"),
        (["--uds", "/tmp/x", "--port", "1"], "--uds"),
        (["--ssl-keyfile", __file__], "--ssl-certfile"),
        (["--allowed-methods", "GET"], "--allowed-origins"),
        (["--allow-credentials", "--allowed-origins", "*"], "--allow-credentials"),
        (["--bogus"], "unknown flag --bogus; --help lists them"),
        (["--max_num_seq=3"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--limit-mm-per-prompts.video", "0"], "did you mean --limit-mm-per-prompt?"),
        (["--tp", "2"], "did you mean -tp?"),
        (["-x"], "unexpected argument '-x'"),
        (["M", "N"], "unexpected argument 'N'"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2: not supported: layers are not distributed"),
        (["--kv-cache-dtype=fp8"], "--kv-cache-dtype fp8: not supported"),
        (["--served-model-name", ""], "--served-model-name"),
        (["--port"], "--port: expected one argument"),
        (["--port", "70000"], "--port: '70000' is not a whole number from 0 to 65535"),
        (["--max-num-seqs", "0"], "--max-num-seqs: '0' is not a whole number of at least 1"),
        (["--dtype", "int3"], "--dtype: 'int3' is not one of auto, float32"),
        (["--device", "cpu", "--distributed-backend", "nccl"], "nccl needs CUDA devices, not --device cpu; use shm"),
        (["--gpu-memory-utilization", "some"], "'some' is not a number from 0.05 to 1.0"),
        (["--kv-cache-memory-bytes", "12Q"], "'12Q' is not a size; write bytes or a number with K, M, G or T"),
        (["--max-model-len", "1.5"], "--max-model-len: '1.5' is not a whole number, such as 16384, 16k"),
        (["--limit-mm-per-prompt", '{"image": {"count": -1}}'], "--limit-mm-per-prompt: 'image': -1"),
        (["--limit-mm-per-prompt", "audio=1"], "audio"),
        (["--limit-mm-per-prompt", "video=one"], """'video=one' is not JSON, such as {"video": 1}"""),
        (["--media-io-kwargs", '{"video": 3}'], "--media-io-kwargs"),
        (["--media-io-kwargs", '{"image": {"mode": "L"}}'], "--media-io-kwargs: images take no arguments"),
        (["--restart-engine", "M"], "put MODEL before --restart-engine alone"),
        (["--mm-processor-device", "cuda", "--device", "cpu"], "not --device cpu; choose cpu"),
        (["--mm-ipc-gpu-memory-gb", "2"], "is for --mm-processor-device cuda; leave it out"),
        ([*CUDA, "--mm-processor-cache-type", "shm"], "choose --mm-processor-cache-type lru or auto"),
        ([*CUDA, "--mm-tensor-ipc", "direct_rpc"], "choose --mm-tensor-ipc auto"),
        ([*CUDA, "--mm-ipc-gpu-memory-gb", "0.01", "--api-server-count", "8", "-dp", "4"], "256 staging slots"),
        ([*CUDA, "--api-server-count", "64", "-dp", "3"], "share a quarter of it; set 6 at least"),
        (["--chat-template", "/nowhere.jinja"], "--chat-template: /nowhere.jinja is not a file"),
        (["--allowed-local-media-path", "/nowhere"], "--allowed-local-media-path: /nowhere is not a directory"),
        (["--help", "Loging"], "'Loging' in its text; did you mean Logging"),
    ],
    ids=str,
)
def test_a_bad_flag_is_named(argv, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        parse(argv, {})


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("API_KEY", "a,", "--api-key"),
        ("ASYNC_SCHEDULING", "perhaps", "MINI_ENGINE_ASYNC_SCHEDULING: 'perhaps' is not true or false"),
        ("PORT", "tcp://10.0.0.1:80", "MINI_ENGINE_PORT: 'tcp://10.0.0.1:80' is not a whole number"),
        ("MULTIMODAL_TENSOR_IPC", "maybe", "'maybe' is not 1 or 0"),
    ],
)
def test_a_bad_variable_is_named(name, value, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        parse([], {f"MINI_ENGINE_{name}": value})


def test_a_flag_of_vllm_says_what_there_is_instead():
    every = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert not every & NOT_SUPPORTED.keys()
    for flag, why in NOT_SUPPORTED.items():
        for argv in ([flag, "1"], [f"{flag}=1"]):
            with pytest.raises(ConfigError, match=re.escape(f"{flag}: not supported: {why}")):
                parse(argv, {})
    texts = (*NOT_SUPPORTED.values(), *dict(NO_EFFECT.values()).values())
    assert {flag for text in texts for flag in FLAG.findall(text)} <= every - NO_EFFECT.keys()


# From the models' cards and from vLLM's pages on them, without `vllm serve`, and what the last flags stand for.
COMMANDS = [
    ("""Qwen/Qwen2.5-VL-7B-Instruct --port 8000 --host 0.0.0.0 --dtype bfloat16
        --limit-mm-per-prompt '{"image":5,"video":5}'""", {"limit_mm_per_prompt": {"image": 5, "video": 5}}),
    ("--model M --dtype bfloat16 --tensor_parallel_size 2 --limit-mm-per-prompt image=5,video=5",
     {"model": "M", "limit_mm_per_prompt": {"image": 5, "video": 5}}),
    ("M -tp 4 --mm-encoder-tp-mode data --data-parallel-size 4 --no-enable-prefix-caching --max-model-len=65536",
     {"mm_encoder_tp_mode": "data", "enable_prefix_caching": False, "max_model_len": 65536}),
    ("M --tensor-parallel-size 8 --limit-mm-per-prompt.video 0 --mm-processor-cache-type shm --async-scheduling "
     "--gpu-memory-utilization 0.95 --max-num-seqs 128", {"limit_mm_per_prompt": {"video": 0}, "max_num_seqs": 128}),
    ("""M --max-model-len 128000 --trust-remote-code --mm-processor-cache-gb 0 --media-io-kwargs
        '{"video": {"num_frames": 8}}'""", {"media_io_kwargs": {"video": {"num_frames": 8}}}),
    ("""Qwen/Qwen3-VL-8B-Instruct --tensor-parallel-size 8 --mm-encoder-tp-mode data --async-scheduling --host 0.0.0.0
        --port 22002 --media-io-kwargs '{"video":{"num_frames":-1}}'""",
     {"media_io_kwargs": {"video": {"num_frames": -1}}}),
    ("--model M --served-model-name Qwen2-VL-7B-Instruct --allowed-local-media-path / --max-model-len 128000",
     {"served_model_name": ["Qwen2-VL-7B-Instruct"], "allowed_local_media_path": "/"}),
    ("M --max_model_len=4096 --served-model-name a b --kv-cache-memory-bytes 512M --no-async-scheduling",
     {"max_model_len": 4096, "served_model_name": ["a", "b"], "kv_cache_memory_bytes": 512 << 20,
      "async_scheduling": False}),
    ("M --max-model-len auto", {"max_model_len": None}),
    ("M --max-model-len -1 --api-server-count 2", {"max_model_len": None, "api_server_count": 2}),
    ("""--limit-mm-per-prompt '{"image": {"count": 4, "width": 512}, "video": {"width": 512}, "audio": 0}'""",
     {"item_limits": {"image": 4, "audio": 0}}),
    ("--limit-mm-per-prompt.image.count 4", {"item_limits": {"image": 4}}),
    ("--limit-mm-per-prompt video=1,image=2", {"item_limits": {"video": 1, "image": 2}}),
]  # fmt: skip


@pytest.mark.parametrize(("command", "expected"), COMMANDS)
def test_a_command_line_of_vllm_runs_unchanged(command, expected):
    settings = settle(shlex.split(command), {})
    assert {name: getattr(settings.config, name) for name in expected} == expected and not settings.notes


def test_a_value_that_asks_for_nothing_that_is_missing_is_accepted_with_a_line():
    values = {None: [], r"[\d.]+": ["4"], r"[0.]+": ["0"], r"\w+": ["info"], r"\d+": ["100"]}
    argv = [[flag, *values.get(taken, str(taken).split("|")[:1])] for flag, (taken, _) in NO_EFFECT.items()]
    notes = settle([arg for args in argv for arg in args], {}).notes
    assert [note.partition(": accepted")[0] for note in notes] == [" ".join(args) for args in argv]
    assert notes[7] == "--swap-space 4: accepted, has no effect: a preempted request is computed again"


def test_sizes_and_counts():
    sizes = {"1000": 1000, "512M": 512 << 20, "1.5G": 3 << 29, "2KiB": 2048, "4gb": 4 << 30}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    counts = {"16384": 16384, "16k": 16000, "16K": 16384, "25.6k": 25600, "1.5M": 3 << 19}
    assert {text: parse_count(text) for text in counts} == counts


def test_the_last_of_a_flags_uses_counts():
    argv = ["--port", "1", "--async-scheduling", "--port", "2", "--no-async-scheduling", "--enable-log-requests"]
    settings = parse([*argv, "--disable-log-requests"], {})
    assert (settings.port, settings.async_scheduling, settings.enable_log_requests) == (2, False, False)


def test_parts_of_an_object_add_up():
    """As vLLM's pages show them."""
    parts = ["--media_io_kwargs.video.num_frames", "10", "--media-io-kwargs.video.start=1.5", "--port", "1"]
    settings = parse(["--limit-mm-per-prompt.video", "0", "--limit-mm-per-prompt", '{"image": 2}', *parts], {})
    assert settings.limit_mm_per_prompt == {"video": 0, "image": 2}
    assert settings.media_io_kwargs == {"video": {"num_frames": 10, "start": 1.5}} and settings.port == 1
    twice = parse([*parts, "--media-io-kwargs", '{"video": {"num_frames": 4}}', "--mm-processor-kwargs.a_b", "c"], {})
    assert twice.media_io_kwargs == {"video": {"num_frames": 4, "start": 1.5}}
    assert twice.mm_processor_kwargs == {"a_b": "c"}


@pytest.mark.parametrize(("argv", "most"), [([], 0), (["--restart-engine"], 3), (["--restart-engine", "7"], 7)])
def test_a_flag_that_may_stand_alone(argv, most):
    assert parse(argv, {}).restart_engine == most


def test_a_bad_start_is_one_line_and_status_2(tmp_path):
    for argv, named in (
        (["--port", "x"], "--port"),
        (["no/such-model"], "no/such"),
        (["-tp", "3"], "--tensor-parallel-size: 4 attention heads cannot be shared evenly by 3 workers"),
    ):
        result = subprocess.run(
            [sys.executable, "serve.py", *argv], cwd=ROOT, capture_output=True, text=True,
            env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
        )  # fmt: skip
        assert result.returncode == 2
        *before, last = result.stderr.splitlines()
        assert named in last and all("taking it from the hub" in line for line in before), result.stderr


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        (["--host", "::", "--swap-space", "4"], ["--swap-space 4: accepted, ", "--host ::: all who reach "]),
        (["--api-key", "k"], []),
    ],
)
def test_the_first_lines_say_what_starts(flags, first):
    command = [sys.executable, "serve.py", "--port", "0", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        for text in [*first, "loading mini-engine-demo (Qwen2_5_VLForConditionalGeneration) from "]:
            assert f" supervisor | {text}" in process.stderr.readline()
        process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("program", ["serve.py", "bench.py"])
def test_an_interrupt_before_anything_runs_is_silent(program):
    code = (
        "import runpy, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.startswith('mini_engine'): raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"runpy.run_path({program!r}, run_name='__main__')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_help_shows_every_setting_with_its_default():
    command = [sys.executable, "serve.py", "--help"]
    environ = {"PATH": "/usr/bin:/bin", "COLUMNS": "100"}
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environ).stdout
    assert shown.startswith("usage: serve.py [MODEL] [--flag VALUE ...]\n") and shown.endswith(EXAMPLES)
    assert not re.search(r"[a-z]-$", shown, re.MULTILINE), "a flag is broken at a dash"
    words = " ".join(shown.split())
    for field in config.fields():
        assert config.flag_of(field.name) in shown
        assert f"(default: {default_of(field)})" in words, field.name
        assert f"\n{field.metadata['option'].group}:\n" in shown
    assert "The same as --no-enable-log-requests." in words
    assert "The same as --mm-tensor-ipc torch_shm." in words


@pytest.mark.parametrize(
    ("word", "there", "absent"),
    [
        ("logging", "--log-format", "--port"),
        ("max_num", "--max-num-seqs", "--seed"),
        ("num_frames", "--media-io-kwargs", "--port"),
        ("disable_multimodal", "--mm-tensor-ipc", "--port"),
    ],
)
def test_help_on_a_word(capsys, word, there, absent):
    with pytest.raises(SystemExit) as ended:
        parse(["--help", word], {})
    part = capsys.readouterr().out
    assert ended.value.code == 0 and f"  {there}" in part and f"  {absent}" not in part and "examples" not in part


def test_the_examples_can_be_parsed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text("max-num-seqs: 8\n")
    commands = re.findall(r"^  python serve\.py ?(.*?)(?:  +.*)?$", EXAMPLES, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        parse(shlex.split(command.partition(" > ")[0]), {})
