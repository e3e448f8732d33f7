"""Writes the tables of docs/config.md, below the text with which it begins: `python -m mini_engine.config`."""

from pathlib import Path

from mini_engine.config import Setting, groups

PAGE = Path(__file__).parent.parent.parent / "docs" / "config.md"


def row(setting: Setting) -> str:
    """A line of the table for one setting."""
    flags = [f"`{flag}`" for flag in setting.flags]
    if setting.positional:
        flags.insert(0, f"`{setting.metavar}`, the first argument")
    cells = (", ".join(flags), f"`{setting.variable}`", setting.default_text, setting.values, setting.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(text: str) -> str:
    """The page with new tables, in Markdown."""
    lines = [text.partition("\n## ")[0].rstrip()]
    for group, settings in groups().items():
        lines += [f"\n## {group}\n", "| flag | variable | default | values | |", "|---|---|---|---|---|"]
        lines += map(row, settings)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
