"""Writes docs/config.md to stdout: `python -m mini_engine.config > docs/config.md`."""

from __future__ import annotations

import dataclasses
from typing import Any

from mini_engine.config import Option, env_of, field_types, fields
from mini_engine.config.options import default_of, flags_of, values_of

HEAD = """# Settings

This page is written by `python -m mini_engine.config`, from the fields in `mini_engine/config/`.

Each setting is a flag of `serve.py`, an environment variable, and a line of a YAML file:

    .venv/bin/python serve.py --max-num-seqs 8
    MINI_ENGINE_MAX_NUM_SEQS=8 .venv/bin/python serve.py
    echo 'max-num-seqs: 8' > small.yaml && .venv/bin/python serve.py --config small.yaml

A flag overrides a variable, a variable overrides the file. `--config` names the file, or `MINI_ENGINE_CONFIG` does. Its
keys are flags without the leading dashes; `true` and `false` stand for a flag and its `--no-` form, and `null` for the
default. `--print-config` prints all settings and the source of each, in the form that `--config` reads, and exits; API
keys are not printed. Underscores work as dashes, in flags and in files. A part of a JSON object can be a flag of its
own, and parts are merged: `--media-io-kwargs.video.num_frames 10`. In a file this is `media-io-kwargs: {video:
{num_frames: 10}}`. Integers may have a unit: 16k is 16000 and 16K is 16384, and so on with m, g and t, as in vLLM.

Variables hold what a flag's value would be: lists separated by commas (`a,b`) or as JSON, booleans as `true` or
`false`. `MINI_ENGINE_MULTIMODAL_TENSOR_IPC` is `1` for `--enable-multimodal-tensor-ipc`, `0` for
`--disable-multimodal-tensor-ipc`. An unknown variable with this prefix is only a warning, since Kubernetes sets some
for a service called mini-engine. `MINI_ENGINE_PORT` among them is refused: set `enableServiceLinks: false`.

A value that cannot work is refused at start, in one line that says what to do. The exit status is 2, or 1 if it takes
one of the server's processes to find out, such as the memory of a device. A setting without effect on the device at
hand, such as `--gpu-memory-utilization` on a CPU, is named in one line of the log.

Command lines for vLLM work as they are where the feature exists. A flag of vLLM that is not below is an error; for
common flags it says what there is instead.
"""


def row(field: dataclasses.Field[Any], kind: Any) -> str:
    """A line of the table for one setting."""
    opt: Option = field.metadata["option"]
    flags = [f"`{flag}`" for flag in flags_of(field, kind)]
    if opt.positional:
        flags.insert(0, f"`{opt.metavar}`, the first argument")
    cells = (", ".join(flags), f"`{env_of(field.name)}`", default_of(field), values_of(opt, kind), opt.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """The page, in Markdown."""
    lines = [HEAD]
    kinds, group = field_types(), ""
    for field in fields():
        if field.metadata["option"].group != group:
            group = field.metadata["option"].group
            lines += [f"\n## {group}\n", "| flag | variable | default | values | |", "|---|---|---|---|---|"]
        lines.append(row(field, kinds[field.name]))
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    print(page(), end="")
