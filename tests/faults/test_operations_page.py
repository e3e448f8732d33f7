"""docs/operations.md names tests that exist, error lines of the code, and metrics that exist."""

import re

from mini_engine import metrics
from tests.support.running_server import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()
# Error lines of the system and of libraries; and one that is put together.
OF_OTHERS = {
    "Resource temporarily unavailable",
    "OpenBLAS blas_thread_init: …",
    "Failed to find C compiler",
    "Python.h: No such file or directory",
    "died: killed by SIGKILL",
}


def test_named_tests_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) >= 15
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert not missing, missing


def test_every_row_of_the_first_table_names_a_test():
    rows = [line for line in PAGE.partition("## systemd")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 13
    assert not [row for row in rows if "::test_" not in row]


def test_error_lines_exist_in_the_code():
    rows = re.findall(r"^\| (`.+?) \|", PAGE.partition("## When it does not start")[2], re.MULTILINE)
    lines = [line for row in rows for line in re.findall("`([^`]+)`", row)]
    assert len(lines) >= 25
    # Text between the quotes of adjacent literals, and what f-strings fill in, is one gap.
    files = [re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in (ROOT / "mini_engine").rglob("*.py")]
    parts = {line: [part for part in map(str.strip, line.split("…")) if len(part) > 3] for line in lines}
    missing = {line for line in lines if not any(all(part in file for part in parts[line]) for file in files)}
    assert missing == OF_OTHERS


def test_named_metrics_exist():
    known, named = (set(re.findall(r"mini_engine:\w+", text)) for text in (metrics.exposition("m").decode(), PAGE))
    assert named and named <= known, named - known
