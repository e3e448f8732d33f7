"""Processes that are held at a fail point from a shell, and released."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mini_engine.failpoints import FAILPOINTS, VARIABLE

PACKAGE = Path(__file__).parent.parent / "mini_engine"
COMMAND = [sys.executable, "-m", "mini_engine.failpoints"]
REACH = [sys.executable, "-c", "from mini_engine.failpoints import reach_failpoint; reach_failpoint('accepting')"]


def test_hold_names_the_process_and_release_lets_it_go_on(tmp_path: Path) -> None:
    environ = {**os.environ, VARIABLE: str(tmp_path)}
    holding = subprocess.Popen([*COMMAND, "hold", "accepting"], env=environ, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "accepting.armed").exists():
        assert holding.poll() is None
    with subprocess.Popen(REACH, env=environ) as held:
        output, _ = holding.communicate()
        assert output == f"accepting holds process {held.pid}: {' '.join(REACH)}\n" and held.poll() is None
        subprocess.run([*COMMAND, "release", "accepting"], env=environ, check=True)
        assert held.wait() == 0 and not list(tmp_path.iterdir())


def test_a_wrong_name_and_a_missing_directory_are_errors(tmp_path: Path) -> None:
    for name, directory, error in (
        ("acepting", tmp_path, "invalid choice: 'acepting' (choose from 'resolving-model', "),
        ("accepting", tmp_path / "none", f"{VARIABLE} is not the directory that the server was started with"),
    ):
        environ = {**os.environ, VARIABLE: str(directory)}
        failed = subprocess.run([*COMMAND, "hold", name], env=environ, capture_output=True, text=True)
        assert failed.returncode == 2 and error in failed.stderr


def test_each_fail_point_is_reached_somewhere() -> None:
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert {*re.findall(r'^ +reach_failpoint\("(.+)"\)', code, re.MULTILINE)} == FAILPOINTS.keys()
