"""The README's commands, as they stand, against a running server."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from mini_engine.demo import videos
from tests.e2e.running_server import ROOT

README = (ROOT / "README.md").read_text()


def block_after(heading: str, page: str = README) -> str:
    """The first indented block after a line."""
    after = page[page.index(heading) :]
    match = re.search(r"((?:^    .*\n)+)", after, re.MULTILINE)
    assert match is not None
    return re.sub(r"^    ", "", match[1], flags=re.MULTILINE)


def test_the_video_and_its_answer(server, tmp_path):
    commands = block_after("Render one, and ask what it shows")
    assert "localhost:8000" in commands and ".venv/bin/python" in commands
    commands = commands.replace("http://localhost:8000", server.url.removesuffix("/v1"))
    commands = commands.replace(".venv/bin/python", sys.executable)
    result = subprocess.run(["bash", "-e", "-c", commands], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])["choices"][0]["message"]["content"]
    shown = re.search(r'"content":"([^"]*)"', block_after("The answer:"))
    assert shown is not None and answer == shown[1]


def test_the_image_and_its_answer(server, tmp_path):
    commands = block_after("A question about an image:", (ROOT / "docs" / "api.md").read_text())
    assert "localhost:8000" in commands and "What colour is it?" in commands
    picture = videos.render_image(4 * 10**9)
    (tmp_path / "picture.png").write_bytes(videos.encode_image(picture))
    commands = commands.replace("http://localhost:8000", server.url.removesuffix("/v1"))
    result = subprocess.run(["bash", "-e", "-c", commands], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert json.loads(result.stdout)["choices"][0]["message"]["content"] == picture.colour, result.stderr


def test_both_commands_of_a_newcomer_are_there():
    install = 'python3 -m venv .venv && .venv/bin/pip install -e ".[dev]" && '
    assert f"{install}.venv/bin/python serve.py\n" in README
    assert f"{install}.venv/bin/python -m pytest\n" in README


def test_every_file_and_folder_of_the_package_has_its_line():
    for path in sorted((ROOT / "mini_engine").iterdir()):
        if path.name.startswith("__") or (path.suffix != ".py" and not path.is_dir()):
            continue
        name = f"mini_engine/{path.name}" + ("/" if path.is_dir() else "")
        assert f"`{name}`" in README, f"README.md has no line for {name}"
