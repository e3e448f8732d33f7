"""docs/operations.md names tests that exist, error lines of the code, and metrics that exist."""

import re

from mini_engine import metrics
from tests.support.running_server import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()


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
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## When it does not start")[2], re.MULTILINE)
    assert len(rows) >= 14
    source = "\n".join(path.read_text() for path in (ROOT / "mini_engine").rglob("*.py"))
    # Text between the quotes of adjacent literals, and what f-strings fill in, is one gap.
    spoken = re.sub(r'"\s*\n\s*f?"', "", source)
    parts = [part for row in rows for part in map(str.strip, row.split("…")) if len(part) > 3]
    missing = [part for part in parts if part not in spoken and not part.startswith("died: killed by")]
    assert not missing, missing


def test_named_metrics_exist():
    known, named = (set(re.findall(r"mini_engine:\w+", text)) for text in (metrics.exposition("m").decode(), PAGE))
    assert named and named <= known, named - known
