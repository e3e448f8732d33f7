"""The command line of `bench.py`: one command for each thing that can be measured; without one it is `serve`.

A command is a module with `add_arguments(parser)` and `run(args) -> Report`, whose docstring is its description; only
the one that is asked for is imported. It prints a text for people; where stdout is no terminal, or with --json, the
last line is one JSON object. Progress goes to stderr.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mini_engine.config import ConfigError

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "serve": "requests to an OpenAI-compatible server, as its clients send them; the default",
    "ab": "two servers with different flags on the same prompts, in turn",
    "sweep": "one flag's values, with a table",
    "transport": "tensors from one process into all ranks, by each placement of the tensor queue",
    "step": "the engine's overhead per decode step",
    "roofline": "decode, prefill and vision of a model on this CPU, as shares of what the machine can do",
    "gpu": "decode, prefill and vision of a model on a CUDA device; --check: whether it works",
}
FLAG_TEXTS = ("--launch", "--a", "--b", "--flag")  # flags whose value is itself flags
PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "av")


class BenchError(RuntimeError):
    """There is no result; the text says why."""


@dataclasses.dataclass
class Report:
    """What a command measured. `results` is plain JSON data; `failures` are sentences, and make the exit status 1."""

    results: dict[str, Any]
    failures: list[str] = dataclasses.field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if something failed while it was measured, 2 for flags that cannot
    be used, 130 after Ctrl-C."""
    # By way of every `with`, so that what a command has started is stopped.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        report = args.command.run(args)
    except (ConfigError, BenchError, OSError) as error:
        say(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        say("interrupted")
        return 128 + signal.SIGINT
    for failure in report.failures:
        print(f"failed: {failure}")
    if args.json or not sys.stdout.isatty():
        print(json.dumps({**environment(args), **dataclasses.asdict(report)}, default=str), flush=True)
    return 1 if report.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """What was typed; underscores in a flag's name are dashes, and `--launch --no-async-scheduling` is
    `--launch=--no-async-scheduling`, whose value argparse would take for a flag."""
    if argv and argv[0] in ("-h", "--help"):
        lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
        print("usage: bench.py [COMMAND] [flags]\n", *lines, "\n`bench.py COMMAND --help` shows its flags.", sep="\n")
        raise SystemExit(0)
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("serve", argv)
    typed: list[str] = []
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if typed and typed[-1] in FLAG_TEXTS:
            typed[-1] += "=" + arg
        else:
            typed.append(flag.replace("_", "-") + equals + value if arg.startswith("--") else arg)
    command = importlib.import_module(f"benchmarks.{name}")
    usage, layout = f"bench.py {name} [flags]", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.py", usage, command.__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="Print the JSON line on a terminal, too.")
    command.add_arguments(parser)
    parser.set_defaults(regime=name, command=command)
    return parser.parse_args(typed)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """The flags, and the versions and the hardware: of `all` that was measured, or, where the server ran before and may
    be on another machine, of the `client` alone."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    # By what the driver says, since torch is not imported here.
    gpus = [card.read_text().splitlines()[0] for card in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    flags = {name: "inf" if value == math.inf else value for name, value in vars(args).items() if name != "command"}
    return {
        "regime": args.regime,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": flags,
        "environment_of": "client" if flags.get("launch", "") is None else "all",
        "commit": commit or None,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "hardware": {
            "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": [gpu.partition(":")[2].strip() for gpu in gpus],
            "load_average": os.getloadavg(),  # whether the measurements had the machine to themselves
        },
    }


def say(text: str) -> None:
    """A line on stderr."""
    print(f"bench.py: {text}", file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lines of right-aligned columns, the first one left-aligned. Floats get three decimals, None a dash."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells
    )


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
