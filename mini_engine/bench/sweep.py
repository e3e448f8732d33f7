"""One flag with several values, everything else alike.

The flag is one of this client (such as --max-concurrency, --request-rate, --unique-ratio) or of serve.py (such as
--max-num-seqs). A fresh server is started for each value, so that none finds another's caches; with --base-url, --host
or --port the one that runs there is asked, caches and all, and the flag must be the client's.
"""

from __future__ import annotations

import argparse
import copy

from mini_engine.bench import serve
from mini_engine.bench.datasets import load
from mini_engine.bench.report import Report, say, table
from mini_engine.bench.server import open_target, server_flags
from mini_engine.config import ConfigError

COLUMNS = {
    "completed": "done", "failed": "failed", "request_throughput": "req/s", "output_throughput": "tok/s",
    "median_ttft_ms": "TTFT p50", "p99_ttft_ms": "TTFT p99", "median_tpot_ms": "TPOT p50",
    "median_e2el_ms": "E2EL p50", "p99_e2el_ms": "E2EL p99",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag that varies, and those of `serve`."""
    group = parser.add_argument_group("sweep")
    group.add_argument("--flag", required=True, metavar="NAME", help="A flag of this client or of serve.py.")
    group.add_argument("--values", required=True, metavar="A,B,C", help="Comma-separated values of the flag.")
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Measure each value, then print the table and draw the plot."""
    flag = "--" + args.flag.lstrip("-").replace("_", "-")
    running = bool(args.base_url or args.host or args.port)
    values = args.values.split(",")
    points = [_with_value(args, flag, value, running) for value in values]
    runs, failures, rows = [], [], []
    for value, mine in zip(values, points, strict=True):
        say(f"{flag} {value}")
        launch = None if running else server_flags("--launch", mine.launch)
        with open_target(mine, launch) as target:
            measured = serve.measure(mine, target, load(mine, target.model), f"{flag} {value}")
        serve.save(mine, measured, value.replace("/", "_"))
        results, right = measured.results, measured.results["accuracy"]
        runs.append(results)
        failures += [f"{flag} {value}: {failure}" for failure in measured.failures]
        rows.append([value, *map(results.get, COLUMNS), f"{right['share']:.1%}" if right else None])
    print(table([flag, *COLUMNS.values(), "right"], rows))
    if args.plot is not None:
        from mini_engine.bench import plot

        plot.draw_sweep(flag, values, runs, args.plot)
    return Report({"flag": flag, "values": values, "runs": runs}, failures, all_here=not running)


def _with_value(args: argparse.Namespace, flag: str, value: str, running: bool) -> argparse.Namespace:
    """The flags with one value.

    Raises:
        ConfigError: no such flag, a running server cannot change its flags, or the flags do not fit each other.
    """
    mine = copy.copy(args)
    mine.launch = None if running else args.launch or ""
    parser = argparse.ArgumentParser(prog="bench.py sweep", usage="bench.py sweep [flags]", allow_abbrev=False)
    serve.add_arguments(parser)
    _, unknown = parser.parse_known_args([f"{flag}={value}"], mine)
    if unknown and running:
        raise ConfigError(f"--flag: {flag} is not a flag of this client; for a flag of the server, omit its address")
    if unknown:
        mine.launch = f"{mine.launch} {flag}={value}"
        server_flags("--flag", mine.launch)
    serve.check(mine)
    return mine
