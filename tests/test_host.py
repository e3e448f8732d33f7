"""What a server takes from its host, and which settings mean nothing there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mini_engine.cli import settle
from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.host import load_model_config, runtime_directory, without_effect
from mini_engine.messages import MediaCachePlan
from tests.e2e.barriers import eventually
from tests.e2e.running_server import ROOT, descendants

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


def test_sizes_of_media_beside_their_count() -> None:
    assert useless(["--limit-mm-per-prompt", '{"image": {"count": 4}}']) == []
    said = useless(["--limit-mm-per-prompt", '{"image": {"count": 4, "width": 512}}'])
    assert said == ["--limit-mm-per-prompt (sizes beside a count change nothing)"]


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


def test_no_room_for_a_directory_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(ConfigError, match="^no room for a directory in /proc .*: set TMPDIR"):
        runtime_directory().__enter__()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc", "/nowhere"])
    with pytest.raises(ConfigError, match="no room for a directory in"):
        runtime_directory().__enter__()


def test_a_directory_outlives_neither_its_process_nor_a_signal_to_all(tmp_path: Path) -> None:
    """As when a service manager stops its unit, and then kills what has not stopped."""
    code = "import sys; from mini_engine.host import *; runtime_directory(Path(sys.argv[1])).__enter__(); input()"
    command = [sys.executable, "-c", code, str(tmp_path)]

    def janitor() -> int:
        (found,) = descendants(held.pid) or [0]
        ignored = int(re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{found or held.pid}/status").read_text())[0], 16)
        assert found and all(ignored & 1 << number - 1 for number in numbers)
        return found

    def check() -> None:
        assert not list(tmp_path.iterdir())

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as held:
        for number in numbers:
            os.kill(eventually(janitor), number)
        assert len(list(tmp_path.iterdir())) == 1
        held.kill()
    eventually(check)


def test_the_end_of_a_server_does_not_wait_for_a_janitor_that_stands_still(tmp_path: Path) -> None:
    directory = runtime_directory(tmp_path)
    with directory:
        os.kill(directory.janitor.pid, signal.SIGSTOP)
    assert directory.janitor.returncode == 0 and not list(tmp_path.iterdir())
