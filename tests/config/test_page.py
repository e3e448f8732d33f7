"""docs/config.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mini_engine import config
from mini_engine.config.__main__ import HEAD
from mini_engine.config.options import default_of, parse_bytes, size_text

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_up_to_date():
    command = [sys.executable, "-m", "mini_engine.config"]
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "config.md").read_text() == written, "python -m mini_engine.config > docs/config.md"
    for field in config.fields():
        assert f"`{config.env_of(field.name)}` | {default_of(field)} |" in written


def test_its_commands_do_the_same(tmp_path):
    """As they stand, but for showing what would be served."""
    commands = re.findall(r"^    (.*)", HEAD, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        here = command.replace(".venv/bin/python serve.py", f"{sys.executable} {ROOT}/serve.py")
        shown = subprocess.run(
            ["bash", "-c", f"{here} --print-config"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        assert "\nmax-num-seqs: 8  # " in shown and "  # default" in shown


def test_a_default_says_something():
    """A default of nothing says what it stands for."""
    for field in config.fields():
        empty = default_of(field) in ("", "None", "[]", "{}")
        assert not empty, f"{field.name} needs `unset`"


def test_the_settings_of_a_group_stand_together():
    groups = [field.metadata["option"].group for field in config.fields()]
    assert len({*groups}) == 1 + sum(one != other for one, other in zip(groups, groups[1:], strict=False))


def test_a_size_is_read_as_it_is_written():
    for nbytes in (0, 1, 1000, 1 << 10, 3 << 20, 1 << 30, (1 << 30) + 1, 5 << 40):
        assert parse_bytes(size_text(nbytes)) == nbytes
    assert (size_text(256 << 20), size_text(1 << 40)) == ("256M", "1T")
