"""Prometheus' text format of several hosts as one: each sample gets the label `host`."""

from __future__ import annotations

from collections.abc import Mapping


def merge_expositions(texts: Mapping[str, str]) -> str:
    """One exposition of those of the hosts, in which the lines of one metric follow each other, as the format asks."""
    families: dict[str, list[str]] = {}
    for host, text in texts.items():
        family: list[str] = []
        for line in text.splitlines():
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, [])
                if line not in family:
                    family.append(line)
            elif line:
                name, brace, rest = line.partition("{")
                if brace:
                    family.append(f'{name}{{host="{host}",{rest}')
                else:
                    name, _, value = line.partition(" ")
                    family.append(f'{name}{{host="{host}"}} {value}')
    return "".join(f"{line}\n" for family in families.values() for line in family)
