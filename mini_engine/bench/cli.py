"""The command line of `bench.py`: one command for each thing that can be measured; without one it is `serve`.

A command is a module with `add_arguments(parser)` and `run(args) -> Report`, whose docstring is its description; only
the one that is asked for is imported. It prints a text for people; the last line of stdout is one JSON object. Progress
goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Sequence

from mini_engine.bench.report import BenchError, environment, say
from mini_engine.config import ConfigError

COMMANDS = {
    "serve": "requests to an OpenAI-compatible server, as its clients send them; the default",
    "ab": "two servers with different flags on the same prompts, in turn",
    "sweep": "one flag's values, with a table and a plot",
    "transport": "tensors from one process into all ranks, by each placement of the tensor queue",
    "step": "the engine's overhead per decode step",
    "gpu": "decode, prefill and vision of a 7 B model on a CUDA device",
}
FLAG_TEXTS = ("--launch", "--a", "--b", "--flag")  # flags whose value is itself flags


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
    command = importlib.import_module(f"mini_engine.bench.{name}")
    parser = argparse.ArgumentParser(
        prog="bench.py", usage=f"bench.py {name} [flags]", description=command.__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_arguments(parser)
    parser.set_defaults(regime=name, command=command)
    return parser.parse_args(typed)


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
        return 128 + signal.SIGINT
    for failure in report.failures:
        print(f"failed: {failure}")
    found = {"regime": args.regime, **environment(args, report.all_here)}
    print(json.dumps({**found, "results": report.results, "failures": report.failures}, default=str), flush=True)
    return 1 if report.failures else 0
