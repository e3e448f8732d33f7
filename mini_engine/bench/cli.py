"""The command line of `bench.py`: one subcommand for each regime, and the output conventions that all share.

Without the name of a regime it is `serve`, and a flag of vLLM's serving benchmark that is not here says so.

A regime is a module with `HELP`, `add_arguments(parser)` and `run(args) -> Report`; nothing heavy is imported before
`run`. What it prints is a text for people and, as the last line of stdout, one JSON object; files are written after it.
Progress goes to stderr.
This file knows nothing of servers or engines.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from mini_engine.bench import ab, core, gpu, serve, sweep, transport
from mini_engine.bench.files import check_file, write, write_text
from mini_engine.bench.parser import Parser
from mini_engine.bench.redaction import config_of
from mini_engine.bench.report import BenchError, Report, as_json, say
from mini_engine.bench.serving.vllm import REFUSED
from mini_engine.config import ConfigError
from mini_engine.config.sources import suggestion
from mini_engine.stdout import tell


class Regime(Protocol):
    """What a regime's module offers. Its docstring is the subcommand's description."""

    __doc__: str | None
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the regime's own flags."""

    def run(self, args: argparse.Namespace) -> Report:
        """Measure.

        Raises:
            ConfigError: flags that cannot be used, with the remedy.
            BenchError: there is no result.
        """


PACKAGES = ("matplotlib", "tqdm")  # of the extra `bench`
INTERRUPTED = 128 + signal.SIGINT  # the exit status of a shell's command that Ctrl-C has ended
DEFAULT_REGIME = "serve"
REGIMES: dict[str, Regime] = {
    "serve": serve,
    "ab": ab,
    "sweep": sweep,
    "core": core,
    "transport": transport,
    "gpu": gpu,
}
FLAG_TEXTS = ("--launch", "--a", "--b", "--flag")  # flags whose value is itself a text of flags


def build_parser() -> Parser:
    """The parser of `bench.py`; see `parse`."""
    parser = Parser(
        prog="bench.py", description="Measure mini-engine.", allow_abbrev=False, usage="bench.py [REGIME] [flags]",
        epilog=f"Without REGIME it is {DEFAULT_REGIME}; `bench.py {DEFAULT_REGIME} --help` shows its flags.",
    )  # fmt: skip
    commands = parser.add_subparsers(prog="bench.py", dest="regime", metavar="REGIME", required=True)
    for name, regime in REGIMES.items():
        command = commands.add_parser(
            name, help=regime.HELP, description=regime.__doc__, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        regime.add_arguments(command)
        command.add_argument("--output", type=Path, metavar="FILE", help="Write the JSON object to this file too.")
    parser.commands = commands.choices
    return parser


def as_typed(argv: Sequence[str]) -> list[str]:
    """What argparse can read: the regime first, dashes for the underscores in a flag's name, and
    `--launch --no-async-scheduling` as `--launch=--no-async-scheduling`, whose value it would take for a flag.
    """
    named = argv and (argv[0] in REGIMES or argv[0] in ("-h", "--help"))
    read: list[str] = [] if named else [DEFAULT_REGIME]
    for arg in argv:
        name, equals, value = arg.partition("=")
        if read and read[-1] in FLAG_TEXTS:
            read[-1] += "=" + arg
        else:
            read.append(name.replace("_", "-") + equals + value if arg.startswith("--") else arg)
    return read


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """What was typed.

    Raises:
        ConfigError: a flag that is none, or a value of no use.
        SystemExit: for `--help`.
    """
    parser, typed = build_parser(), as_typed(argv)
    if argv and not argv[0].startswith("-") and argv[0] not in REGIMES:
        raise ConfigError(f"unknown regime {argv[0]}{suggestion(argv[0], REGIMES) or '; ' + ', '.join(REGIMES)}")
    if typed[0] in REGIMES:  # first of all, since argparse would miss a required flag before it found a wrong one
        parser.commands[typed[0]].check_flags(typed[1:], REFUSED)
    return parser.parse_args(typed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one regime; returns the exit status: 0, 1 if something failed while it was measured, 2 for bad flags, 130
    after Ctrl-C, also where what was finished by then is told.
    """
    signal.signal(signal.SIGTERM, _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a locale that lacks a character of a result
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(argv: Sequence[str]) -> int:
    try:
        args = parse(argv)
        if args.output is not None:
            check_file("--output", args.output)
        report = REGIMES[args.regime].run(args)
    except ConfigError as error:
        say(str(error))
        return 2
    except BenchError as error:
        say(str(error))
        return 1
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        say(f"the package {error.name} is missing: pip install 'mini-engine[bench]'")
        return 2
    line = json.dumps(as_json(config_of(args), report))
    untold = tell("\n".join([*(f"failed: {failure}" for failure in report.failures), line]))
    if args.output is not None:
        report.files.insert(0, partial(_write_line, args.output, line))
    unwritten = write(report.files)
    for failure in unwritten:
        say(failure)
    if report.interrupted:
        return INTERRUPTED
    return 1 if report.failures or untold or unwritten else 0


def _write_line(path: Path, line: str) -> list[Path]:
    write_text(path, line + "\n")
    return [path]


def _terminate(number: int, _: object) -> None:
    """Leave by way of every `with`, so that what a regime has started is stopped in order."""
    raise SystemExit(128 + number)
