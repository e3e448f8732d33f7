"""docs/config.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mini_engine import config
from mini_engine.config.__main__ import HEAD
from mini_engine.config.options import default_of

ROOT = Path(__file__).parent.parent.parent


def test_page_is_up_to_date():
    command = [sys.executable, "-m", "mini_engine.config"]
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "config.md").read_text() == written, "python -m mini_engine.config > docs/config.md"


def test_commands_of_the_page_do_the_same(tmp_path):
    """As they stand, but for showing what would be served."""
    commands = re.findall(r"^    (.*)", HEAD, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        here = command.replace(".venv/bin/python serve.py", f"{sys.executable} {ROOT}/serve.py")
        shown = subprocess.run(
            ["bash", "-c", f"{here} --print-config"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        assert "\nmax-num-seqs: 8  # " in shown and "  # default" in shown


def test_defaults_are_in_words_and_groups_stand_together():
    unclear = [field.name for field in config.fields() if default_of(field) in ("", "None", "[]", "{}")]
    assert not unclear, "these need `unset`"
    groups = [field.metadata["option"].group for field in config.fields()]
    assert len({*groups}) == 1 + sum(one != other for one, other in zip(groups, groups[1:], strict=False))
