"""The tables of docs/api.md."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def names_below(heading: str) -> set[str]:
    """The first column of the tables of one section."""
    section = re.split(r"^## ", PAGE.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
