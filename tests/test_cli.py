"""The command line and its environment variables."""

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
from mini_engine.cli_help import build_parser
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.config.elsewhere import ELSEWHERE, NO_EFFECT
from mini_engine.config.option import parse_bytes

ROOT = Path(__file__).parent.parent
FLAG = re.compile("--[a-z][a-z-]*")


def test_no_argument_serves_the_bundled_model():
    settings = parse([], {})
    assert settings == EngineConfig()
    assert settings.model == config.BUNDLED_MODEL
    assert settings.served_names == ["mini-engine-demo"]
    assert EngineConfig(model="/a/model").served_names == ["/a/model"], "as it was given: clients may read it"


def test_flags_as_users_of_other_engines_type_them():
    settings = parse(
        ["M", "-tp", "2", "--max_model_len", "4096", "--max-num-seqs=8", "--served-model-name", "a", "b",
         "--limit-mm-per-prompt", '{"video": 1}', "--kv-cache-memory-bytes", "512M", "--no-async-scheduling"], {},
    )  # fmt: skip
    assert settings.model == "M"
    assert settings.tensor_parallel_size == 2
    assert settings.max_model_len == 4096
    assert settings.max_num_seqs == 8
    assert settings.served_names == ["a", "b"]
    assert settings.limit_mm_per_prompt == {"video": 1}
    assert settings.kv_cache_memory_bytes == 512 << 20
    assert settings.async_scheduling is False


def test_a_list_may_come_in_parts():
    assert parse(["--api-key", "a", "b", "--port", "1", "--api-key=c"], {}).api_key == ["a", "b", "c"]
    assert parse([], {"MINI_ENGINE_API_KEY": "a, b"}).api_key == ["a", "b"]


def test_a_list_may_be_json():
    assert parse(["--allowed-origins", '["https://a", "b"]'], {}).allowed_origins == ["https://a", "b"]
    assert parse([], {"MINI_ENGINE_ALLOWED_ORIGINS": '["a", "b"]'}).allowed_origins == ["a", "b"]
    assert parse(["--allowed-media-domains", "[2606:4700::1]:80"], {}).allowed_media_domains == ["[2606:4700::1]:80"]


def test_a_flag_wins_over_the_environment():
    environ = {"MINI_ENGINE_MAX_NUM_SEQS": "3", "MINI_ENGINE_ASYNC_SCHEDULING": "false"}
    settings = parse(["--max-num-seqs", "5"], environ)
    assert (settings.max_num_seqs, settings.async_scheduling) == (5, False)


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, "auto"),
        (["--enable-multimodal-tensor-ipc"], {}, "torch_shm"),
        (["--disable-multimodal-tensor-ipc"], {}, "direct_rpc"),
        (["--mm-tensor-ipc", "direct_rpc"], {}, "direct_rpc"),
        (["--mm-tensor-ipc", "torch_shm", "--enable-multimodal-tensor-ipc"], {}, "torch_shm"),
        ([], {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "1"}, "torch_shm"),
        ([], {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "0"}, "direct_rpc"),
        ([], {"MINI_ENGINE_MM_TENSOR_IPC": "direct_rpc"}, "direct_rpc"),
        (["--enable-multimodal-tensor-ipc"], {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "0"}, "torch_shm"),
        (["--mm-tensor-ipc", "auto"], {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "0"}, "auto"),
    ],
)
def test_the_tensor_transport_switch(argv, environ, expected):
    assert parse(argv, environ).mm_tensor_ipc == expected


CUDA = ["--mm-processor-device", "cuda"]


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--enable-multimodal-tensor-ipc", "--disable-multimodal-tensor-ipc"], {}, "different things"),
        (["--enable-multimodal-tensor-ipc", "--mm-tensor-ipc", "direct_rpc"], {}, "different things"),
        (["--disable-log-requests", "--enable-log-requests"], {}, "different things"),
        ([], {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "1", "MINI_ENGINE_MM_TENSOR_IPC": "direct_rpc"}, "MINI_ENGINE_MM"),
        ([], {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "maybe"}, "'maybe' is not 1 or 0"),
        (["--api-key", ""], {}, "--api-key"),
        ([], {"MINI_ENGINE_API_KEY": "a,"}, "--api-key"),
        (["--root-path", "engine"], {}, "--root-path"),
        (["--root-path", "/engine/"], {}, "--root-path"),
        (["--uds", "/tmp/x", "--port", "1"], {}, "--uds"),
        (["--ssl-keyfile", __file__], {}, "--ssl-certfile"),
        (["--ssl-keyfile", "/nowhere", "--ssl-certfile", __file__], {}, "--ssl-keyfile: /nowhere is not a file"),
        (["--ssl-ca-certs", __file__], {}, "--ssl-cert-reqs"),
        (["--ssl-cert-reqs", "2"], {}, "--ssl-ca-certs"),
        (["--ssl-cert-reqs", "2", "--ssl-ca-certs", __file__], {}, "--ssl-certfile"),
        (["--allowed-methods", "GET"], {}, "--allowed-origins"),
        (["--allow-credentials"], {}, "--allowed-origins"),
        (["--allow-credentials", "--allowed-origins", "*"], {}, "--allow-credentials"),
        (["--bogus"], {}, "unknown flag --bogus; --help lists them"),
        (["--max_num_seq=3"], {}, "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--tensor-paralel-size", "2"], {}, "did you mean --tensor-parallel-size?"),
        (["--tp", "2"], {}, "did you mean -tp?"),
        (['--media-io-kwarg={"video": {}}'], {}, "unknown flag --media-io-kwarg; did you mean --media-io-kwargs?"),
        (["--api-key", "k", "--bogus=a b"], {}, "unknown flag --bogus"),
        (["-x"], {}, "unexpected argument '-x'"),
        (["M", "--model", "N"], {}, "MODEL and --model ask for different things"),
        (["--pipeline-parallel-size", "2"], {}, "--pipeline-parallel-size 2: not supported: layers are not dealt out"),
        (["--kv-cache-dtype=fp8"], {}, "--kv-cache-dtype fp8: not supported"),
        (["--cpu-offload-gb", "4"], {}, "--cpu-offload-gb 4: not supported"),
        (["--limit-mm-per-prompt", '{"image": {"count": -1}}'], {}, "--limit-mm-per-prompt: 'image': -1"),
        (["M", "N"], {}, "unexpected argument 'N'"),
        (["--served-model-name", ""], {}, "--served-model-name"),
        (["--served-model-name", "\udcff"], {}, "is not UTF-8; write it so"),
        (["--mm-processor-kwargs", '{"\udcff": 1}'], {}, "--mm-processor-kwargs: {'\\udcff': 1} is not UTF-8"),
        (["--config", ""], {}, "--config: '' is not a file"),
        (["--limit-mm-per-prompt", f"video={10**30}"], {}, "holds a number that is out of range"),
        (["--mm-processor-kwargs", '{"a": 1%s}' % ("0" * 30)], {}, "holds a number that is out of range"),
        (["--mm-processor-kwargs", "[" * 100_000], {}, "--mm-processor-kwargs: there are too many levels"),
        (["--mm-processor-kwargs" + ".a" * 3000, "1"], {}, "--mm-processor-kwargs: there are 3000 dots"),
        (["--chat-template", "a" * 300], {}, "is not a file"),
        (["--allowed-local-media-path", "a" * 300], {}, "is not a directory"),
        (["--config", "/dev/zero"], {}, "--config: /dev/zero is longer than 1048576 bytes"),
        (["--port", "x"], {}, "--port"),
        (["--port", "70000"], {}, "65535"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs"),
        (["--dtype", "int3"], {}, "--dtype: 'int3' is not one of auto, float32"),
        (["--device", "cpu", "--distributed-backend", "nccl"], {}, "nccl needs CUDA devices, not --device cpu; use sh"),
        (["--seed", "9" * 400], {}, "9 is not a whole number"),
        (["--ssl-cert-reqs", "3"], {}, "--ssl-cert-reqs: 3 is not a whole number from 0 to 2"),
        (["--gpu-memory-utilization", "some"], {}, "'some' is not a number from 0.05 to 1.0"),
        (["--kv-cache-memory-bytes", "12Q"], {}, "512M"),
        (["--kv-cache-memory-bytes", "1e999"], {}, "'1e999' is not a size"),
        (["--kv-cache-memory-bytes", ""], {}, "'' is not a size"),
        (["--limit-mm-per-prompt", '{"audio": 1}'], {}, "audio"),
        (["--limit-mm-per-prompt", "{"], {}, "not JSON"),
        (["--limit-mm-per-prompt", "video=one"], {}, """'video=one' is not JSON, such as {"video": 1}"""),
        (["--limit-mm-per-prompt", "audio=1"], {}, "audio"),
        (["--media-io-kwargs", '{"video": 3}'], {}, "--media-io-kwargs"),
        (["--media-io-kwargs", '{"image": {"mode": "L"}}'], {}, "--media-io-kwargs: images take no arguments"),
        (["--restart-engine", "M"], {}, "with --restart-engine alone, put MODEL before it"),
        (["--mm-processor-device", "cuda", "--device", "cpu"], {}, "not --device cpu; choose cpu"),
        (["--mm-ipc-gpu-memory-gb", "2"], {}, "is for --mm-processor-device cuda; leave it out"),
        ([*CUDA, "--mm-processor-cache-type", "shm"], {}, "choose --mm-processor-cache-type lru or auto"),
        ([*CUDA, "--mm-tensor-ipc", "direct_rpc"], {}, "choose --mm-tensor-ipc auto"),
        ([*CUDA, "--mm-ipc-gpu-memory-gb", "0.01", "--api-server-count", "8", "-dp", "4"], {}, "256 staging slots"),
        ([*CUDA, "--api-server-count", "64", "-dp", "3"], {}, "share a quarter of it; set 6 at least"),
        (["--chat-template", "/nowhere.jinja"], {}, "--chat-template"),
        (["--allowed-local-media-path", "/nowhere"], {}, "--allowed-local-media-path"),
        (["--max-num-queued-reqs", "0"], {}, "--max-num-queued-reqs"),
        (["--max-inflight-media-gb", "0"], {}, "--max-inflight-media-gb"),
        (["--media-decode-timeout", "0"], {}, "--media-decode-timeout"),
        (["--max-request-bytes", "much"], {}, "--max-request-bytes"),
        ([], {"MINI_ENGINE_ASYNC_SCHEDULING": "perhaps"}, "MINI_ENGINE_ASYNC_SCHEDULING: 'perhaps' is not true or f"),
        ([], {"MINI_ENGINE_PORT": "tcp://10.0.0.1:80"}, "MINI_ENGINE_PORT: 'tcp://10.0.0.1:80' is not a whole number"),
        ([], {"MINI_ENGINE_PORT": "70000"}, "MINI_ENGINE_PORT: 70000 is not"),
        ([], {"MINI_ENGINE_KV_CACHE_MEMORY_BYTES": "12Q"}, "MINI_ENGINE_KV_CACHE_MEMORY_BYTES: '12Q' is not a size"),
    ],
)
def test_a_bad_setting_is_named(argv, environ, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        parse(argv, environ)


def test_a_flag_of_another_engine_says_what_there_is_here(tmp_path):
    every = {flag for action in build_parser()._actions for flag in action.option_strings}
    ours = every - NO_EFFECT.keys()
    assert not every & ELSEWHERE.keys()
    for flag, said in ELSEWHERE.items():
        for argv in ([flag, "1"], [f"{flag}=1"], [flag.replace("-", "_").replace("_", "-", 2), "1"]):
            with pytest.raises(ConfigError) as caught:
                parse(argv, {})
            assert str(caught.value) == f"{flag}: {said}"
    named = {flag for said in (*ELSEWHERE.values(), *dict(NO_EFFECT.values()).values()) for flag in FLAG.findall(said)}
    assert named <= ours


# Of the models' cards and of vLLM's pages on them, `vllm serve` left out, and what the last flags stand for.
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


def test_a_value_that_asks_for_nothing_that_is_missing_is_accepted_with_a_line(tmp_path):
    values = {None: [], r"[\d.]+": ["4"], r"[0.]+": ["0"], r"\w+": ["info"], r"\d+": ["100"]}
    argv = [[flag, *values.get(taken, str(taken).split("|")[:1])] for flag, (taken, _) in NO_EFFECT.items()]
    notes = settle([arg for args in argv for arg in args], {}).notes
    assert notes == [f"{' '.join(args)}: accepted, has no effect: {NO_EFFECT[args[0]][1]}" for args in argv]
    assert notes[7] == "--swap-space 4: accepted, has no effect: a preempted request is computed again"
    path = tmp_path / "vllm.yaml"
    path.write_text("swap-space: 4\nenable-chunked-prefill: true\n")
    assert len(settle(["--config", str(path)], {}).notes) == 2
    path.write_text("enable-chunked-prefill: false\n")
    with pytest.raises(ConfigError, match="--enable-chunked-prefill False: not supported: prompts longer"):
        settle(["--config", str(path)], {})


@pytest.mark.parametrize(
    ("text", "value"), [("1000", 1000), ("512M", 512 << 20), ("1.5G", 3 << 29), ("2KiB", 2048), ("4gb", 4 << 30)]
)
def test_sizes(text, value):
    assert parse_bytes(text) == value


def test_a_bad_start_is_one_line_and_status_2(tmp_path):
    for argv, named in (
        (["--port", "x"], "--port"),
        ([str(tmp_path)], f"{tmp_path} has no config.json; give the directory"),
        (["no/such-model"], "no/such"),
        (["/no/such/model"], "/no/such/model is not a directory"),
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
        ([], ["--host 0.0.0.0: all who reach port "]),
        (
            ["--host", "::", "--swap-space", "4"],
            ["--swap-space 4: accepted, has no effect: ", "--host ::: all who reach "],
        ),
        (["--api-key", "k"], []),
        (["--host", "127.0.0.1"], []),
    ],
)
def test_the_first_lines_say_what_starts(flags, first):
    command = [sys.executable, "serve.py", "--port", "0", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        for text in [*first, "loading mini-engine-demo (Qwen2_5_VLForConditionalGeneration) from "]:
            assert f" supervisor | {text}" in process.stderr.readline()
        process.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("text", "value"), [("16384", 16384), ("16k", 16000), ("16K", 16384), ("25.6k", 25600), ("1.5M", 3 << 19)]
)
def test_counts(text, value):
    settings = parse(["--max-model-len", text, "--max-num-batched-tokens", text], {})
    assert settings.max_model_len == settings.max_num_batched_tokens == value


@pytest.mark.parametrize("text", ["16q", "1.5", "25.6789k", "", "k", "nan", "1e999999999", "1e99999", "9" * 400])
def test_a_text_that_is_no_count(text):
    with pytest.raises(ConfigError, match="--max-model-len: "):
        parse([f"--max-model-len={text}"], {})


def test_the_last_of_a_flags_uses_counts():
    settings = parse(["--port", "1", "--async-scheduling", "--port", "2", "--no-async-scheduling"], {})
    assert (settings.port, settings.async_scheduling) == (2, False)


def test_parts_of_an_object_add_up():
    """As vLLM's pages show them."""
    parts = ["--media_io_kwargs.video.num_frames", "10", "--media-io-kwargs.video.start=1.5", "--port", "1"]
    settings = parse(["--limit-mm-per-prompt.video", "0", "--limit-mm-per-prompt", '{"image": 2}', *parts], {})
    assert settings.limit_mm_per_prompt == {"video": 0, "image": 2}
    assert settings.media_io_kwargs == {"video": {"num_frames": 10, "start": 1.5}} and settings.port == 1
    twice = parse([*parts, "--media-io-kwargs", '{"video": {"num_frames": 4}}', "--mm-processor-kwargs.a", "b"], {})
    assert twice.media_io_kwargs == {"video": {"num_frames": 4, "start": 1.5}}
    assert twice.mm_processor_kwargs == {"a": "b"}
    with pytest.raises(ConfigError, match="unknown flag --limit-mm-per-prompts; did you mean --limit-mm-per-prompt"):
        parse(["--limit-mm-per-prompts.video", "0"], {})


def test_twins_that_agree_are_one():
    assert parse(["--disable-log-requests", "--no-enable-log-requests"], {}) == EngineConfig()


def test_flag_before_variable_before_file(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text("max-num-seqs: 1\nport: 1\nseed: 1\n")
    environ = {"MINI_ENGINE_MAX_NUM_SEQS": "2", "MINI_ENGINE_PORT": "2", "MINI_ENGINE_CONFIG": "/not/this/one"}
    settings = settle(["--config", str(path), "--port", "3"], environ)
    assert (settings.config.port, settings.config.max_num_seqs, settings.config.seed) == (3, 2, 1)
    assert settings.origins == {
        "port": "--port", "max_num_seqs": "MINI_ENGINE_MAX_NUM_SEQS", "seed": f"{path} line 3"
    }  # fmt: skip
    assert parse([], {"MINI_ENGINE_CONFIG": str(path)}).seed == 1


def test_print_config_prints_a_file_for_config(tmp_path):
    """As a user does it, with what another engine's users type."""
    argv = ["M", "--limit_mm_per_prompt", '{"video": 1}', "--no-enable-prefix-caching", "--max-num-seqs", "3",
            "--allowed-local-media-path", "/", "--mm-processor-cache-gb", "0", "--disable-log-requests"]  # fmt: skip
    environ = {"PATH": "/usr/bin:/bin", "MINI_ENGINE_MAX_NUM_SEQ": "3", "MINI_ENGINE_SEED": "5"}
    command = [sys.executable, "serve.py", "--print-config"]
    printed = subprocess.run([*command, *argv], cwd=ROOT, capture_output=True, text=True, check=True, env=environ)
    assert "did you mean MINI_ENGINE_MAX_NUM_SEQS?" in printed.stderr
    assert "seed: 5  # MINI_ENGINE_SEED\n" in printed.stdout
    assert "enable-prefix-caching: false  # --no-enable-prefix-caching\n" in printed.stdout
    assert "port: 8000  # default\n" in printed.stdout
    path = tmp_path / "printed.yaml"
    path.write_text(printed.stdout)
    assert parse(["--config", str(path)], {}) == parse(argv, environ)


@pytest.mark.parametrize(("argv", "most"), [([], 0), (["--restart-engine"], 3), (["--restart-engine", "7"], 7)])
def test_a_flag_that_may_stand_alone(argv, most):
    assert parse(argv, {}).restart_engine == most


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
