"""The command line of `bench.py`: one subcommand for each regime, and the output conventions that all share.

Without the name of a regime it is `serve`, so that command lines of vLLM's serving benchmark run as they stand.

A regime is a module with `HELP`, `add_arguments(parser)` and `run(args) -> Report`; nothing heavy is imported before
`run`. What it prints is a text for people and, as the last line of stdout, one JSON object. Progress goes to stderr.
This file knows nothing of servers or engines.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mini_engine.bench import ab, attention, core, gpu, serve, sweep, transport
from mini_engine.bench.report import BenchError, Report, as_json
from mini_engine.config import ConfigError


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


PACKAGES = ("aiohttp", "matplotlib", "tqdm")  # of the extra `bench`
DEFAULT_REGIME = "serve"
REGIMES: dict[str, Regime] = {
    "serve": serve,
    "ab": ab,
    "sweep": sweep,
    "core": core,
    "transport": transport,
    "gpu": gpu,
    "attention": attention,
}
FLAG_TEXTS = ("--serve", "--launch", "--a", "--b", "--flag")  # flags whose value is itself a text of flags


def build_parser() -> argparse.ArgumentParser:
    """The parser of `bench.py`."""
    parser = argparse.ArgumentParser(prog="bench.py", description="Measure mini-engine.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="regime", metavar="REGIME", required=True)
    for name, regime in REGIMES.items():
        command = commands.add_parser(
            name, help=regime.HELP, description=regime.__doc__, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        regime.add_arguments(command)
        command.add_argument("--output", type=Path, metavar="FILE", help="Write the JSON object to this file too.")
    return parser


def as_typed(argv: Sequence[str]) -> list[str]:
    """What argparse can read: the regime first, dashes for the underscores in a flag's name, and
    `--serve --no-async-scheduling` as `--serve=--no-async-scheduling`, whose value it would take for a flag.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one regime; returns the exit status: 0, 1 if something failed while it was measured, 2 for bad flags."""
    args = build_parser().parse_args(as_typed(sys.argv[1:] if argv is None else argv))
    signal.signal(signal.SIGTERM, _terminate)
    try:
        report = REGIMES[args.regime].run(args)
    except ConfigError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except BenchError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        print(f"bench.py: the package {error.name} is missing: pip install 'mini-engine[bench]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    line = json.dumps(as_json(vars(args), report))
    if args.output is not None:
        args.output.write_text(line + "\n")
    for failure in report.failures:
        print(f"failed: {failure}")
    print(line)
    return 1 if report.failures else 0


def _terminate(number: int, _: object) -> None:
    """Leave by way of every `with`, so that what a regime has started is stopped in order."""
    raise SystemExit(128 + number)
