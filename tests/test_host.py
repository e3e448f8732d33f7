"""What a server takes from its host, and which settings mean nothing there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mini_engine.cli import settle
from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.host import load_model_config, without_effect
from mini_engine.messages import MediaCachePlan

SHM, OFF = MediaCachePlan("shm", 1 << 30, ""), MediaCachePlan("off", 0, "")


def useless(
    argv: list[str], cache: MediaCachePlan = SHM, device: str = "cpu", environ: dict | None = None
) -> list[str]:
    settings = settle(argv, environ or {})
    return without_effect(settings.config, settings.origins, cache, device)


def test_nothing_is_said_of_what_was_not_asked_for(tmp_path: Path) -> None:
    assert useless([]) == useless([], OFF) == useless([], device="cuda") == []
    path = tmp_path / "defaults.yaml"
    path.write_text("enforce-eager: false\ngpu-memory-utilization: 0.9\n")  # as --print-config writes it
    assert useless(["--config", str(path)]) == []


def test_what_needs_cuda() -> None:
    asked = ["--gpu-memory-utilization", "0.9", "--no-enforce-eager"]
    assert useless(asked) == [
        "--gpu-memory-utilization (the workers run on the CPU)", "--no-enforce-eager (CUDA graphs need CUDA)"
    ]  # fmt: skip
    assert useless(asked, device="cuda") == []
    assert useless([], environ={"MINI_ENGINE_ENFORCE_EAGER": "1"}) == ["--enforce-eager (CUDA graphs need CUDA)"]


def test_what_needs_several_workers() -> None:
    asked = ["--mm-encoder-tp-mode", "data", "--distributed-backend", "gloo"]
    assert useless(asked) == [
        "--mm-encoder-tp-mode (an engine has one worker)", "--distributed-backend (an engine has one worker)"
    ]  # fmt: skip
    assert useless([*asked, "-tp", "2"]) == []
    # On CUDA it lets the workers of several engines share a device.
    assert useless([*asked, "-dp", "2"], device="cuda") == ["--mm-encoder-tp-mode (an engine has one worker)"]


def test_what_another_setting_overrides() -> None:
    asked = ["--kv-cache-memory-bytes", "1G", "--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "9"]
    assert [text.partition(" ")[0] for text in useless(asked, device="cuda")] == [
        "--gpu-memory-utilization", "--kv-cache-memory-bytes"
    ]  # fmt: skip
    assert useless(["--mm-processor-cache-type", "shm", "--mm-shm-cache-max-object-size-mb", "3"], OFF) == [
        "--mm-processor-cache-type (the cache is off)", "--mm-shm-cache-max-object-size-mb (no cache in shared memory)"
    ]  # fmt: skip
    assert useless([BUNDLED_MODEL, "--revision", "main"]) == ["--revision (MODEL is a directory)"]


def test_a_length_beyond_the_models_own(tmp_path: Path) -> None:
    raw = json.loads((Path(BUNDLED_MODEL) / "config.json").read_text())
    raw["text_config"]["max_position_embeddings"] = 1000
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for settings in ({"max_model_len": 1000}, {"max_model_len": 1001, "allow_long_max_model_len": True}):
        load_model_config(str(tmp_path), EngineConfig(**settings))
    with pytest.raises(
        ConfigError, match="made for 1000 tokens, not 1001; lower it, or allow it with --allow-long-max"
    ):
        load_model_config(str(tmp_path), EngineConfig(max_model_len=1001))
