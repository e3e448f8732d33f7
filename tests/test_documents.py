"""What docs/request-path.md and docs/glossary.md say of files, their lines and their functions is so; docs/config.md
has every setting; pages stay short.

`python -m tests.test_documents` writes the numbers of lines into docs/request-path.md, and the tables of docs/config.md
below the text with which it begins.
"""

import ast
import re
from pathlib import Path

import pytest

from mini_engine import config
from mini_engine.config import Setting

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "request-path.md"
SETTINGS = ROOT / "docs" / "config.md"
PATH = re.compile(r"`(mini_engine/[\w/]+\.py)`")
LINES = re.compile(r"\| ([\d,]+) \|")  # a cell
SPINE = re.compile(r"fourteen files of ([\d,]+) lines")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
TERMS = re.findall(r"^\| `?(.+?)`? \| .+ \| `(.+)` \| .+ \|$", GLOSSARY, re.MULTILINE)


def rows(heading: str) -> list[str]:
    """Of the table below a heading of the page."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if PATH.search(line)]


def num_lines(text: str) -> int:
    """Of all files that a text names."""
    return sum(len((ROOT / path).read_text().splitlines()) for path in PATH.findall(text))


def assert_close(stated: str, lines: int) -> None:
    assert abs(int(stated.replace(",", "")) - lines) <= max(10, lines // 20), f"{stated} lines are {lines}"


@pytest.mark.parametrize("row", rows("In an afternoon") + rows("In two days"), ids=lambda row: row.split("`")[1])
def test_files_have_as_many_lines_as_the_page_says(row: str) -> None:
    assert_close(LINES.search(row)[1], num_lines(row))


@pytest.mark.parametrize("page", ["README.md", "docs/request-path.md"])
def test_the_spine_has_as_many_lines_as_the_pages_say(page: str) -> None:
    spine = rows("In an afternoon")
    assert len(spine) == 14 and num_lines("".join(spine)) < 3650
    assert_close(SPINE.search((ROOT / page).read_text())[1], num_lines("".join(spine)))


def names_in(path: str) -> set[str]:
    """Of the classes of a file, and qualified ones of its functions and methods."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        is_class = isinstance(node, ast.ClassDef)
        owner, parts = (f"{node.name}.", node.body) if is_class else ("", [node])
        names |= {node.name} if is_class else set()
        names |= {owner + part.name for part in parts if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return names


def test_the_table_of_hops_names_what_the_files_have() -> None:
    hops = PAGE.read_text().partition("\n## ")[0]
    named = re.findall(r"`(mini_engine/[\w/]+\.py)`((?: `[\w.]+`,?)*)", hops)
    assert len(named) > 30
    for path, names in named:
        assert {*re.findall(r"`([\w.]+)`", names)} <= names_in(path), path


def test_calls_exist_and_are_as_few_as_the_page_says() -> None:
    calls: dict[str, list[str]] = {"text": [], "video": []}
    for row in rows("Calls"):
        _, path, *columns = row.strip("|").split("|")
        for kind, names in zip(calls, columns, strict=True):
            calls[kind] += (named := re.findall(r"`([\w.]+)`", names))
            assert {*named} <= names_in(path.strip(" `")), row
    text, video = len(calls["text"]), len(calls["text"] + calls["video"])
    assert f"a text request takes {text} calls, a request with a new video {video}." in PAGE.read_text()
    assert text <= 22 and video <= 65


def settings_page(text: str) -> str:
    """The page with new tables, in Markdown."""
    lines = [text.partition("\n## ")[0].rstrip()]
    for group, settings in config.groups().items():
        lines += [f"\n## {group}\n", "| flag | variable | default | values | |", "|---|---|---|---|---|"]
        lines += map(settings_row, settings)
    return "\n".join(lines) + "\n"


def settings_row(setting: Setting) -> str:
    flags = [f"`{flag}`" for flag in setting.flags]
    if setting.positional:
        flags.insert(0, f"`{setting.metavar}`, the first argument")
    cells = (", ".join(flags), f"`{setting.variable}`", setting.default_text, setting.values, setting.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def test_the_page_of_settings_is_up_to_date() -> None:
    assert settings_page(SETTINGS.read_text()) == SETTINGS.read_text(), "run python -m tests.test_documents"
    unclear = [setting.name for setting in config.fields() if setting.default_text in ("", "None", "[]", "{}")]
    assert not unclear, "these need `unset`"


@pytest.mark.parametrize(("page", "words"), [("benchmarks.md", 2800), ("data-plane.md", 2300)])
def test_pages_can_be_read_to_the_end(page: str, words: int) -> None:
    assert len((ROOT / "docs" / page).read_text().split()) <= words


def test_the_glossary_is_short() -> None:
    num_rows = sum(line.startswith("| ") for line in GLOSSARY.splitlines()) - 1  # without the head
    assert len(dict(TERMS)) == len(TERMS) == num_rows <= 60


@pytest.mark.parametrize(("term", "path"), [pytest.param(*row, id=row[0]) for row in TERMS])
def test_terms_occur_in_their_files(term: str, path: str) -> None:
    """In any of `the term`, `the_term`, `TheTerm`, across the end of a line."""
    words = r"[\s_#-]*".join(re.escape(word) for word in re.split(r"[ -]", term))
    assert re.search(words, (ROOT / path).read_text(), re.IGNORECASE), f"{path} has no {term!r}"


if __name__ == "__main__":
    text, spine = PAGE.read_text(), num_lines("".join(rows("In an afternoon")))
    for row in rows("In an afternoon") + rows("In two days"):
        text = text.replace(row, LINES.sub(f"| {round(num_lines(row), -1):,} |", row))
    SETTINGS.write_text(settings_page(SETTINGS.read_text()))
    PAGE.write_text(SPINE.sub(f"fourteen files of {round(spine, -1):,} lines", text))
