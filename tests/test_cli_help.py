"""What `--help` shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mini_engine import config
from mini_engine.cli import parse
from mini_engine.cli_help import EXAMPLES
from mini_engine.config import ConfigError
from mini_engine.config.option import default_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def shown() -> str:
    command = [sys.executable, "serve.py", "--help"]
    environ = {"PATH": "/usr/bin:/bin", "COLUMNS": "100"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environ).stdout


def test_every_setting_is_shown_with_its_default(shown):
    words = " ".join(shown.split())
    for field in config.fields():
        assert config.flag_of(field.name) in shown or field.metadata["option"].positional
        assert f"(default: {default_of(field)})" in words, field.name
        assert f"\n{field.metadata['option'].group}:\n" in shown
    assert "The same as --no-enable-log-requests." in words
    assert "The same as --mm-tensor-ipc torch_shm." in words


def test_it_begins_with_what_users_look_for(shown):
    assert shown.splitlines()[0] == "usage: serve.py [MODEL] [--flag VALUE ...]"
    assert shown.endswith(EXAMPLES)


def test_no_flag_is_broken(shown):
    assert not re.search(r"[a-z]-$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("word", "there", "absent"),
    [
        ("logging", "--log-format", "--port"),
        ("max_num", "--max-num-seqs", "--seed"),
        ("Media", "--mm-tensor-ipc", "--port"),
        ("video", "--media-io-kwargs", "--port"),
        ("num_frames", "--media-io-kwargs", "--port"),
        ("disable_multimodal", "--mm-tensor-ipc", "--port"),
        ("--max-num-seqs", "--max-num-seqs", "--seed"),
        ("--max_num_seqs", "--max-num-seqs", "--seed"),
        ("--config", "--print-config", "--port"),
    ],
)
@pytest.mark.parametrize("joint", [False, True])
def test_a_part_of_it(capsys, word, there, absent, joint):
    with pytest.raises(SystemExit) as ended:
        parse([f"--help={word}"] if joint else ["--help", word], {})
    part = capsys.readouterr().out
    assert ended.value.code == 0 and f"  {there}" in part and f"  {absent}" not in part and "examples" not in part


def test_a_part_that_is_not_there():
    with pytest.raises(ConfigError, match="'Loging' .* did you mean Logging"):
        parse(["--help", "Loging"], {})
    with pytest.raises(ConfigError, match="groups: Admission, "):
        parse(["--help", "xyz"], {})


def test_the_examples_can_be_parsed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text("max-num-seqs: 8\n")
    commands = re.findall(r"^  python serve\.py ?(.*?)(?:  +.*)?$", EXAMPLES, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        parse(shlex.split(command.partition(" > ")[0]), {})
