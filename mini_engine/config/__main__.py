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

The flag counts before the variable, the variable before the file, and the file before the default. `--config` names the
file, or `MINI_ENGINE_CONFIG` does. Its keys are flags without the dashes in front; `true` and `false` stand for a flag
and its `--no-` form, and `null` for the default. `--print-config` shows all settings and where each comes from, in the
form that `--config` reads, and ends; keys of clients are not shown. Underscores work as dashes, in flags and in files.
A part of a JSON object can be a flag of its own, and parts add up: `--media-io-kwargs.video.num_frames 10`. In a file
such parts are written below each other, `media-io-kwargs: {video: {num_frames: 10}}`.

Variables hold what a flag's value would be: lists with commas between (`a,b`) or as JSON, booleans as `true` or
`false`. `MINI_ENGINE_MULTIMODAL_TENSOR_IPC` is `1` for `--enable-multimodal-tensor-ipc`, or `0` for the contrary. A
variable with this prefix that is no setting gets a warning only, since Kubernetes sets some for a service that is
called mini-engine. It sets `MINI_ENGINE_PORT` too, which is then refused; `enableServiceLinks: false` keeps them away.

What cannot be used is refused at start, in one line that says what to do. The exit status is 2, or 1 if it takes one of
the server's processes to find out, such as the memory of a device. What has no effect on the device at hand, such as
`--gpu-memory-utilization` on a CPU, is said in one line of the log.

Command lines for vLLM work as they are where the feature exists. A flag of vLLM that is not below is accepted if its
value asks for nothing that is missing, with one line of the log: `--swap-space 4: accepted, has no effect: …`. Other
values and flags, such as `--pipeline-parallel-size 2`, end the start with a line that says what there is instead.
"""


def row(field: dataclasses.Field[Any], kind: Any) -> str:
    """A line of the table for one setting."""
    opt: Option = field.metadata["option"]
    flags = [f"`{flag}`" for flag in [*flags_of(field, kind), *opt.twins]]
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
