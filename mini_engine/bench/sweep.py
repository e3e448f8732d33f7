"""Regime `sweep`: one flag with several values, everything else alike.

The flag is one of this client (such as --max-concurrency, --request-rate, --unique-ratio) or of serve.py (such as
--max-num-seqs). A fresh server is started for each value, so that none finds another's caches; with --base-url, --host
or --port the one that runs there is asked, caches and all, and the flag must be the client's.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from mini_engine.bench.files import write
from mini_engine.bench.parser import Parser
from mini_engine.bench.redaction import config_of
from mini_engine.bench.report import Report, say, table
from mini_engine.bench.serving import flags
from mini_engine.config import ConfigError
from mini_engine.config.sources import suggestion
from mini_engine.stdout import tell

if TYPE_CHECKING:
    from mini_engine.bench.serving.measure import Measured
    from mini_engine.bench.serving.settings import Settings

HELP = "one flag's values, with a table and a plot"
COLUMNS = {
    "completed": "done", "failed": "failed", "request_throughput": "req/s", "output_throughput": "tok/s",
    "median_ttft_ms": "TTFT p50", "p99_ttft_ms": "TTFT p99", "median_tpot_ms": "TPOT p50",
    "median_e2el_ms": "E2EL p50", "p99_e2el_ms": "E2EL p99",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag that varies, and those of `serve`."""
    group = parser.add_argument_group("sweep")
    group.add_argument("--flag", required=True, metavar="NAME", help="A flag of this client or of serve.py.")
    group.add_argument("--values", required=True, metavar="A,B,C", help="Its values.")
    flags.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Measure each value, then print the table and draw the plot."""
    from mini_engine.bench.serving import results
    from mini_engine.bench.serving.measure import next_of

    flag = "--" + args.flag.lstrip("-").replace("_", "-")
    values = [value.strip() for value in args.values.split(",")]
    points = [(value, settings_with(args, flag, value)) for value in values]
    if args.plot is not None:
        from mini_engine.bench.serving import plot

        plot.check(args.plot)
    if points[0][1].launch is None and len(points) > 1:
        say("the server runs on from value to value, and the prompts are the same: all but the first find its caches "
            "filled. Leave out --base-url, --host and --port to have a fresh server for each")  # fmt: skip
    found: list[Measured] = []
    report = Report({}, all_here=points[0][1].launch is not None)
    for value, settings in points:
        say(f"{flag} {value}")
        measured = next_of(bool(found), f"{flag} {value}", report, partial(_measured, settings, f"{flag} {value}"))
        if measured is None:
            break
        found.append(measured)
        report.failures += [f"{flag} {value}: {failure}" for failure in measured.failures]
        if settings.output.save_result:
            name = value.replace("/", "_")
            report.failures += write([partial(results.save, settings, measured, config_of(args), name)])
    report.figures = {"flag": flag, "values": values[: len(found)], "runs": [measured.figures for measured in found]}
    report.failures += tell(describe(report.figures))
    if args.plot is not None:
        report.files.append(lambda: plot.draw(plot.of_sweep(report.figures), args.plot))
    return report


def _measured(settings: Settings, title: str) -> Measured:
    from mini_engine.bench.serving.measure import prepared, run_once

    with prepared(settings) as ready:
        return run_once(ready, title)


def settings_with(args: argparse.Namespace, flag: str, value: str) -> Settings:
    """The settings of one value.

    Raises:
        ConfigError: no such flag, a server that runs cannot change its flags, or the settings do not fit each other.
    """
    from mini_engine.bench.serving.settings import server_flags, settings_of
    from mini_engine.cli_help import build_parser

    running = args.base_url or args.host or args.port
    mine = copy.copy(args)
    mine.launch = None if running else args.launch or ""
    parser = Parser(prog="bench.py sweep", add_help=False, allow_abbrev=False)
    flags.add_arguments(parser)
    known = [*parser.flags, *(option for action in build_parser()._actions for option in action.option_strings)]
    if flag not in known:
        near = suggestion(flag, known, "--")
        raise ConfigError(f"--flag: {flag} is a flag neither of this client nor of serve.py{near}")
    _, unknown = parser.parse_known_args([f"{flag}={value}"], mine)
    if unknown and running:
        raise ConfigError(
            f"{flag} is no flag of this client, and the server's cannot change while it runs: use --launch"
        )
    if unknown:
        server_flags("--values", f"{flag}={value}")
        mine.launch = f"{mine.launch} {flag}={value}"
    return settings_of(mine)


def describe(figures: dict[str, Any]) -> str:
    """A row for each value."""
    rows = [
        [value, *(run.get(key) for key in COLUMNS), _right(run)]
        for value, run in zip(figures["values"], figures["runs"], strict=True)
    ]
    return table([figures["flag"], *COLUMNS.values(), "right"], rows)


def _right(run: dict[str, Any]) -> str | None:
    known = run["accuracy"]
    return known and f"{100 * known['share']:.1f} %"
