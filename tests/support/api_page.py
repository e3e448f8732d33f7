"""The tables of docs/api.md."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def names_below(heading: str) -> set[str]:
    """The first column of the tables of one section, and what it has as in a chat request."""
    section = re.split(r"^## ", PAGE.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]
    shared = "".join(re.findall(r"^As in a chat request: (.+?)\.$", section, re.MULTILINE | re.DOTALL))
    return {*re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE), *re.findall(r"`(\w+)`", shared)}
