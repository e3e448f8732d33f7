"""docs/config.md."""

from __future__ import annotations

import re
import subprocess
import sys

from mini_engine import config
from mini_engine.config.__main__ import PAGE, page

ROOT = PAGE.parent.parent


def test_page_is_up_to_date():
    assert page(PAGE.read_text()) == PAGE.read_text(), "run python -m mini_engine.config"


def test_commands_of_the_page_do_the_same(tmp_path):
    """As they stand, but for showing what would be served."""
    commands = re.findall(r"^    (.*)", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        here = command.replace(".venv/bin/python serve.py", f"{sys.executable} {ROOT}/serve.py")
        shown = subprocess.run(
            ["bash", "-c", f"{here} --print-config"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        assert "\nmax-num-seqs: 8  # " in shown and "  # default" in shown


def test_defaults_are_in_words():
    unclear = [one.name for one in config.fields() if one.default_text in ("", "None", "[]", "{}")]
    assert not unclear, "these need `unset`"
