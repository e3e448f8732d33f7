"""The command line of `serve.py`: flags, what is refused, and `--help`."""

import re
import shlex

import pytest

from mini_engine import config
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.config.options import parse_count
from mini_engine.config.sources import VLLM_FLAGS
from mini_engine.launch.cli import EXAMPLES, parse


def test_no_argument_serves_the_bundled_model():
    settings = parse([], {})
    assert settings == EngineConfig() and settings.served_names == ["mini-engine-demo"]
    assert EngineConfig(model="/a/model").served_names == ["/a/model"], "as it was given: clients may read it"


def test_tensor_transport_switch():
    switch = {"MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "0"}
    assert parse(["--disable-multimodal-tensor-ipc"], {}).mm_tensor_ipc == "direct_rpc"
    assert parse([], switch).mm_tensor_ipc == "direct_rpc"
    assert parse(["--enable-multimodal-tensor-ipc"], switch).mm_tensor_ipc == "torch_shm"


def test_command_lines():
    """From the models' cards and from vLLM's pages on them, without `vllm serve`, and single flags in all their forms.

    The last use of a flag counts, but parts of an object are merged."""
    for command, expected in [
        ("""Qwen/Qwen2.5-VL-7B-Instruct --port 8000 --host 0.0.0.0 --dtype bfloat16
            --limit-mm-per-prompt '{"image":5,"video":5}'""", {"limit_mm_per_prompt": {"image": 5, "video": 5}}),
        ("--model M --dtype bfloat16 --tensor_parallel_size 2 --limit-mm-per-prompt image=5,video=5",
         {"model": "M", "limit_mm_per_prompt": {"image": 5, "video": 5}}),
        ("M -tp 4 --mm-encoder-tp-mode data --data-parallel-size 4 --no-enable-prefix-caching --max-model-len=65536",
         {"mm_encoder_tp_mode": "data", "enable_prefix_caching": False, "max_model_len": 65536}),
        ("M --tensor-parallel-size 8 --limit-mm-per-prompt.video 0 --mm-processor-cache-type shm --async-scheduling "
         "--gpu-memory-utilization 0.95 --max-num-seqs 9", {"limit_mm_per_prompt": {"video": 0}, "max_num_seqs": 9}),
        ("""M --max-model-len 128000 --trust-remote-code --mm-processor-cache-gb 0 --media-io-kwargs
            '{"video":{"num_frames":-1}}'""", {"media_io_kwargs": {"video": {"num_frames": -1}}}),
        ("M --max_model_len=4096 --served-model-name a b --kv-cache-memory-bytes 512M --no-async-scheduling",
         {"max_model_len": 4096, "served_model_name": ["a", "b"], "kv_cache_memory_bytes": 512 << 20,
          "async_scheduling": False}),
        ("M --max-model-len auto", {"max_model_len": None}),
        ("M --max-model-len -1 --api-server-count 2", {"max_model_len": None, "api_server_count": 2}),
        ("""--limit-mm-per-prompt '{"image": {"count": 4, "width": 512}, "video": {"width": 512}, "audio": 0}'""",
         {"item_limits": {"image": 4, "audio": 0}}),
        ("--restart-engine", {"restart_engine": 3}),
        ("--restart-engine 7", {"restart_engine": 7}),
        ("--api-key a b --port 1 --api-key=c,d", {"api_key": ["a", "b", "c", "d"]}),
        ("""--allowed-origins '["https://a", "b"]'""", {"allowed_origins": ["https://a", "b"]}),
        ("--allowed-media-domains [2606:4700::1]:80", {"allowed_media_domains": ["[2606:4700::1]:80"]}),
        ("--port 1 --port 2 --enable-log-requests --disable-log-requests", {"port": 2, "enable_log_requests": False}),
        ("""--media_io_kwargs.video.num_frames 10 --media-io-kwargs.video.start=1.5 --mm-processor-kwargs.min_pixels c
            --media-io-kwargs '{"video": {"num_frames": 4}}'""",
         {"media_io_kwargs": {"video": {"num_frames": 4, "start": 1.5}}, "mm_processor_kwargs": {"min_pixels": "c"}}),
    ]:  # fmt: skip
        settings = parse(shlex.split(command), {})
        assert {name: getattr(settings, name) for name in expected} == expected, command


def test_unusable_flags_are_named():
    cuda = "--mm-processor-device cuda"
    for command, error in {
        "--bogus": "--bogus: unknown; --help lists the flags",
        **{f"{flag}=1": f"{flag}: not supported: {instead}" for flag, instead in VLLM_FLAGS.items()},
        "--max_num_seq=3": "--max-num-seq: unknown; did you mean --max-num-seqs?",
        "--limit-mm-per-prompts.video 0": "did you mean --limit-mm-per-prompt?",
        "M N": "N: no flag takes this value, and MODEL is 'M'",
        "serve M --port 1": "M: no flag takes this value, and MODEL is 'serve'",
        "-q awq_marlin": "not one of none, int8, int4; a quantised checkpoint needs no flag",
        "--swap-space 4 --task x --port y": "--task: not supported: use --runner and --convert\n--port: ",
        "--port": "--port: expected one argument",
        "--port 70000": "--port: '70000' is not an integer from 0 to 65535",
        "--dtype int3": "--dtype: 'int3' is not one of auto, float32",
        "--kv-cache-memory-bytes 12Q": "'12Q' is not an integer of at least 1",
        "--limit-mm-per-prompt video=one": "'video=one' is not a JSON object",
        # Values that do not fit each other, or name what does not exist.
        "--allowed-local-media-path /nowhere": "--allowed-local-media-path: /nowhere is not a directory",
        "--changed-only": "--changed-only needs --print-config",
        "--api-key a,": "--api-key: empty; omit the flag to require none",
        "--uds /tmp/x --port 1": "--uds",
        "--allowed-hosts a/b": "--allowed-hosts",
        "--forwarded-allow-ips 10.0.0.1/8": "--forwarded-allow-ips",
        "--ssl-keyfile key.pem": "--ssl-certfile",
        "--allowed-methods GET": "--allowed-origins",
        "--state-snapshot-interval 100": "--state-snapshot-interval: not a multiple of --block-size, 16",
        "--limit-mm-per-prompt.image.count=-1": "--limit-mm-per-prompt: 'image': -1",
        "--limit-mm-per-prompt text=1": "'text'",
        "--media-io-kwargs.image.mode L": "--media-io-kwargs: only `video` takes arguments",
        "--media-io-kwargs null": "--media-io-kwargs: 'null' is not a JSON object",
        "--media-io-kwargs.video.frames 3": "--media-io-kwargs: unknown frames; it takes num_frames, ",
        "--mm-processor-kwargs.fpss 3": "--mm-processor-kwargs: unknown fpss; it takes size, ",
        "--mm-ipc-gpu-memory-gb 2": "--mm-ipc-gpu-memory-gb needs --mm-processor-device cuda",
        f"{cuda} --device cpu": "not --device cpu; choose cpu",
        f"{cuda} --mm-processor-cache-type shm": "choose --mm-processor-cache-type lru or auto",
        f"{cuda} --mm-tensor-ipc direct_rpc": "choose --mm-tensor-ipc auto",
    }.items():
        with pytest.raises(ConfigError) as raised:
            parse(shlex.split(command), {})
        assert error in str(raised.value), command
    with pytest.raises(ConfigError, match="(?s)^--uds: .*\n--forwarded-allow-ips: .*\n--media-io-kwargs: "):
        parse(shlex.split("--uds x --port 1 --forwarded-allow-ips me --media-io-kwargs.image.mode L"), {})


def test_debug_lengthens_the_time_outs_that_are_not_given():
    config = parse(["--debug", "--health-timeout", "5"], {})
    given = (config.collective_timeout, config.startup_timeout, config.health_timeout, config.shutdown_timeout)
    assert given == (86400, 86400, 5, EngineConfig.shutdown_timeout)
    assert config.data_parallel_size == 1 and not {60, 120} & {config.media_decode_timeout, config.timeout_client}
    assert parse(["--no-debug"], {}) == EngineConfig()


def test_integers_with_units():
    counts = {"16384": 16384, "16k": 16000, "16K": 16384, "25.6k": 25600, "1.5M": 3 << 19, "4g": 4 * 10**9}
    assert {text: parse_count(text) for text in counts} == counts


def help_text(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(argv, {})
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_setting_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    words = " ".join(help_text(capsys, "--help").split())
    for field in config.fields():
        assert f" {field.flag}" in words and f"(default: {field.default_text})" in words, field.name
    assert "The same as --no-enable-log-requests." in words
    assert "The same as --mm-tensor-ipc torch_shm." in words


def test_help_on_a_word_shows_its_flags_alone(capsys):
    # The word is in the group, in the name, in the help.
    for word, flag in {"logging": "--log-format", "max_num": "--max-num-seqs", "fps": "--media-io-kwargs"}.items():
        part = help_text(capsys, "--help", word)
        assert f"  {flag}" in part and "  --port" not in part


def test_examples_of_help_can_be_parsed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text("max-num-seqs: 8\n")
    commands = re.findall(r"^  python serve\.py ?(.*?)(?:  +.*)?$", EXAMPLES, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        parse(shlex.split(command.partition(" > ")[0]), {})
