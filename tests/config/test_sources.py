"""Settings from variables and files, as `--print-config` writes them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mini_engine import config
from mini_engine.config import ConfigError, EngineConfig, Setting
from mini_engine.config.sources import from_environment, from_file, to_yaml
from mini_engine.launch.cli import parse, settle
from mini_engine.launch.plan.parallelism import has_gpu

ROOT = Path(__file__).parents[2]
SAMPLES: dict[type, Any] = {int: 3, float: 4.5, str: "it's # a: text", list: ["a", "[b]:1", "1"]}
SAMPLES[dict] = {"video": {"fps": 2.5, "deep": {"list": [1, None, "a"]}}}


def sample(setting: Setting) -> Any:
    """A value that is not the default."""
    if setting.choices:
        return setting.choices[-1]
    if setting.base is bool:
        return not setting.default
    value = SAMPLES[setting.base]
    if setting.base in (int, float):
        return min((setting.minimum or 0) + value, setting.maximum or 10**9)
    return value


def test_every_setting_survives_the_file(tmp_path):
    every = EngineConfig(**{setting.name: sample(setting) for setting in config.fields()})
    path = tmp_path / "all.yaml"
    path.write_text(to_yaml(every, {"api_key": "MINI_ENGINE_API_KEY"}))
    assert "# api-key: not shown  # MINI_ENGINE_API_KEY\n" in path.read_text(), "it is secret"
    given = from_file(str(path), [])
    names = {setting.name for setting in config.fields()} - {"api_key"}
    assert {name: value for name, (value, _) in given.items()} == {name: getattr(every, name) for name in names}
    assert given["model"].origin == str(path)


def test_every_setting_can_be_given_by_its_variable():
    for setting in config.fields():
        value = sample(setting)
        if setting.base is not dict:  # which --media-io-kwargs of test_cli.py shows
            text = ",".join(value) if isinstance(value, list) else str(value)
            assert from_environment({setting.variable: text}, [])[setting.name].value == value, setting.name
        if setting.default != "":
            from_environment({setting.variable: ""}, errors := [])
            assert errors == [f"{setting.variable}: empty; leave it out for the default"]
    for name, says in (("CONFIG", "empty; leave it out"), ("MULTIMODAL_TENSOR_IPC", "'' is not 1 or 0")):
        with pytest.raises(ConfigError, match=f"MINI_ENGINE_{name}: {says}"):
            settle([], {f"MINI_ENGINE_{name}": ""})


def test_file_as_users_write_one(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: M\n"
        "max_num_seqs: 8  # underscores work as dashes\n"
        "kv-cache-memory-bytes: 512M\n"
        "media-fetch-timeout: 3\n"
        "limit-mm-per-prompt: '{\"video\": 1}'\n"
        "media-io-kwargs:\n  video:\n    num_frames: 10\n"
        "allowed-media-domains: [a.example, 'b.example:80']\n"
        "served-model-name: name\n"
        "enable-prefix-caching: no\n"
        "seed: null\n"
    )
    flags = "--limit-mm-per-prompt video=1 --media-io-kwargs.video.num_frames 10 --no-enable-prefix-caching "
    flags += "--allowed-media-domains a.example b.example:80 --max-num-seqs 8 --media-fetch-timeout 3 "
    flags += "--kv-cache-memory-bytes 512M --served-model-name name --model M"
    assert parse(["--config", str(path)], {}) == parse(flags.split(), {})
    path.write_text("")
    assert parse(["--config", str(path)], {}) == EngineConfig()


def test_unusable_settings_are_named_with_their_file(tmp_path):
    path = tmp_path / "bad.yaml"
    for text, error in {
        "port: 1\nmax-num-seq: 3\n": ": max-num-seq: unknown; did you mean --max-num-seqs?",
        "port: yes\n": ": port: True is not an integer from 0 to 65535",
        "seed: 1.5\n": ": seed: 1.5 is not an integer",
        "api-key: [1]\n": ": api-key: what is given is not a list of strings",  # it is secret
        "quantization: awq\n": ": quantization: 'awq' is not one of none, int8, int4",
        "media-io-kwargs: 3\n": "is not a JSON object",
        "a: {\n": "cannot be read: while parsing",
        "- port\n": "cannot be read: Expected `object | null`, got `array`",
        None: "bad.yaml cannot be read: [Errno 2]",
    }.items():
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        with pytest.raises(ConfigError) as raised:
            parse(["--config", str(path)], {})
        assert error in str(raised.value) and "\n" not in str(raised.value)


def test_each_unusable_setting_is_a_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("port: yes\nseed: 1\nmax-num-seq: 3\n")
    named = [f"{path}: port: ", f"{path}: max-num-seq: ", *(f"MINI_ENGINE_{name}: " for name in ("SEED", "HOST"))]
    named += ["--dtype: ", "--port: "]
    with pytest.raises(ConfigError) as raised:
        settle([*f"--config {path} --port x --dtype f".split()], {"MINI_ENGINE_SEED": "x", "MINI_ENGINE_HOST": ""})
    lines = str(raised.value).splitlines()
    assert all(line.startswith(start) for line, start in zip(lines, named, strict=True)), lines


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--log-format=json --port x --seed x", ["--seed", "--port"]),
        (
            "--log_format json --device cuda --ssl-certfile nowhere --ssl-keyfile nowhere",
            [*([] if has_gpu() else ["--device cuda"]), "--ssl-keyfile, --ssl-certfile"],
        ),
    ],
    ids=["values", "host"],
)
def test_errors_of_a_start_are_in_the_format_of_the_log(flags, named):
    command, environ = [sys.executable, "serve.py", *flags.split()], {**os.environ, "MINI_ENGINE_PROT": "1"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    warning, *errors = map(json.loads, ended.stderr.splitlines())
    assert ended.returncode == 2
    assert (warning["level"], warning["message"]) == (
        "warning",
        "MINI_ENGINE_PROT is ignored: unknown; did you mean --port?",
    )
    assert [line["message"].partition(":")[0] for line in errors] == named
    assert {line["level"] for line in errors} == {"error"}


def test_what_is_changed_is_a_file_too():
    argv = ["--port", "3", "--seed", "0", "--log-format", "json"]
    expected = "# Server\nport: 3  # --port\n\n# Logging\nlog-format: json  # --log-format\n"
    assert settle(["--print-config", "--changed-only", *argv], {}).printed == expected
    assert settle(["--print-config", "--changed-only"], {}).printed == ""


def test_flag_before_variable_before_file(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text("max-num-seqs: 1\nport: 1\nseed: 1\n")
    environ = {"MINI_ENGINE_MAX_NUM_SEQS": "2", "MINI_ENGINE_PORT": "2", "MINI_ENGINE_CONFIG": "/not/this/one"}
    settings = settle(["--config", str(path), "--port", "3"], environ)
    assert (settings.config.port, settings.config.max_num_seqs, settings.config.seed) == (3, 2, 1)
    assert settings.origins == {"port": "--port", "max_num_seqs": "MINI_ENGINE_MAX_NUM_SEQS", "seed": str(path)}
    assert parse([], {"MINI_ENGINE_CONFIG": str(path)}).seed == 1


def test_print_config_prints_a_file_for_config(tmp_path):
    """And unknown variables are warnings, and vLLM's: Kubernetes sets some."""
    argv = ["M", "--limit_mm_per_prompt", '{"video": 1}', "--no-enable-prefix-caching", "--max-num-seqs", "3"]
    environ = {"MINI_ENGINE_SEED": "5", "MINI_ENGINE_PORTS": "1", "MINI_ENGINE_SERVICE_HOST": "1"}
    environ |= {"PATH": "/usr/bin:/bin", "MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "1"}
    environ |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_API_KEY": "secret"}
    command = [sys.executable, "serve.py", "--print-config", *argv]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environ)
    assert printed.stderr.splitlines() == [
        "serve.py: MINI_ENGINE_PORTS is ignored: unknown; did you mean --port?",
        "serve.py: MINI_ENGINE_SERVICE_HOST is ignored: unknown; --help lists the flags",
        "serve.py: VLLM_API_KEY, VLLM_CPU_KVCACHE_SPACE: ignored; variables are named after the flags, such as "
        "MINI_ENGINE_API_KEY for --api-key",
    ]
    assert "seed: 5  # MINI_ENGINE_SEED\n" in printed.stdout and "port: 8000  # default\n" in printed.stdout
    path = tmp_path / "printed.yaml"
    path.write_text(printed.stdout)
    assert parse(["--config", str(path)], {}) == parse(argv, environ)
