"""The README's commands: each block is run by a test here."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cli as bench_cli
from mini_engine.config import BUNDLED_MODEL, EngineConfig
from mini_engine.demo import videos
from mini_engine.launch.cli import parse
from mini_engine.model.architectures import SPECS
from tests.support.client import use_server
from tests.support.running_server import ROOT

README = (ROOT / "README.md").read_text()
PYTHON = ".venv/bin/python"
# All indented blocks, and those in fences but the picture. Each has a test below: for a new one write a test.
CAPTION, OWN_VIDEOS, FROM_PYTHON, SERVE, TESTS, RENDER, OUTPUT, HUB, HELP, BENCH = (
    match[2] or re.sub(r"^    ", "", match[1], flags=re.MULTILINE)
    for match in re.finditer(r"\n\n((?:    .*\n)+)|^```\w*\n((?:(?!```|.*──►).*\n)+)```", README, re.MULTILINE)
)


def shell(commands: str, cwd: Path, **variables: str) -> str:
    """The output of commands in an empty directory, with the project's Python."""
    commands = re.sub(r" (serve\.py|bench\.py|examples/)", rf" {ROOT}/\1", commands.replace(PYTHON, sys.executable))
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(cwd), **variables}
    result = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=cwd, capture_output=True, text=True, timeout=1200, env=environ
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_ci_script_runs_the_test_command(tmp_path):
    script = (ROOT / ".ci" / "run").read_text()
    assert script.splitlines()[-1] == 'eval "$command"'
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(script.partition("# The browser")[0])
    (tmp_path / "README.md").write_text(README)
    assert shell("bash .ci/run", tmp_path).removeprefix("+ ") == TESTS


def test_video_request_and_its_documented_answer(server, tmp_path):
    assert "http://localhost:8000" in RENDER
    printed = shell(RENDER.replace("http://localhost:8000", server.base_url), tmp_path)
    answer = json.loads(printed.splitlines()[-1])["choices"][0]["message"]["content"]
    assert f'"content":"{answer}"' in OUTPUT


def test_caption_commands(server, media_root, monkeypatch, capsys):
    _, render, caption = CAPTION.splitlines()
    assert OWN_VIDEOS.split()[:2] == caption.split()[:2]  # the same with another model
    shell(render, media_root)
    monkeypatch.chdir(media_root)
    use_server(server, monkeypatch)
    _, script, *args = shlex.split(caption)
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert len((media_root / "captions.jsonl").read_text().splitlines()) == 3
    exec(FROM_PYTHON, {})
    answers = capsys.readouterr().out.splitlines()
    assert sorted(answer.split()[0] for answer in answers) == ["0", "1", "2"]


def test_serve_commands_are_understood():
    """The fixture `server` runs such a one."""
    bundled, *others = (parse(shlex.split(command)[2:], {}).model for command in (SERVE + HUB).splitlines())
    assert bundled == BUNDLED_MODEL and others and all(model.startswith("Qwen/") for model in others)


def test_help_and_config_file(tmp_path):
    show, write, use = HELP.splitlines()
    assert "--mm-processor-cache-gb" in shell(show, tmp_path)
    shell(write, tmp_path)
    settings = parse(["--config", str(tmp_path / "mine.yaml")], {})
    assert settings == EngineConfig(max_num_seqs=8, media_io_kwargs={"video": {"num_frames": 16}})
    assert use.endswith("--config mine.yaml")
    assert "max-num-seqs: 8  # mine.yaml\n" in shell(f"{use} --print-config", tmp_path)


def test_bench_commands_are_understood():
    """`tests/benchmarks` runs such commands."""
    for command in BENCH.splitlines():
        bench_cli.parse(shlex.split(command)[2:])


@pytest.mark.slow
def test_train_command(tmp_path):
    """Of the table of folders: a few steps, with output to another directory."""
    small = "--steps 2 --every 2 --patches 300 --pool 8 --pool-start 8 --held-out 8 --count 1 --threads 1 --out weights"
    printed = shell(f"{PYTHON} -m training.train {small}", tmp_path)
    assert (tmp_path / "weights" / "model.safetensors").exists() and "h264" in printed


def test_every_model_is_in_the_table():
    assert all(f"`{architecture}`" in README for architecture in SPECS)


def test_image_request_of_the_api_page(server, tmp_path):
    """The example of docs/api.md."""
    page = (ROOT / "docs" / "api.md").read_text()
    found = re.search(r"A question about an image:\n\n((?:    .*\n)+)", page)
    assert found is not None
    commands = re.sub(r"^    ", "", found[1], flags=re.MULTILINE)
    assert "http://localhost:8000" in commands and "What colour is it?" in commands
    picture = videos.render_image(4 * 10**9)
    (tmp_path / "picture.png").write_bytes(videos.encode_image(picture))
    printed = shell(commands.replace("http://localhost:8000", server.base_url), tmp_path)
    assert json.loads(printed)["choices"][0]["message"]["content"] == picture.colour


def test_every_file_of_the_package_is_in_the_table():
    for path in sorted((ROOT / "mini_engine").iterdir()):
        if path.name.startswith("__") or (path.suffix != ".py" and not path.is_dir()):
            continue
        name = f"mini_engine/{path.name}" + ("/" if path.is_dir() else "")
        assert f"`{name}`" in README, f"README.md has no line for {name}"
