"""One flag with several values, everything else alike.

The flag is one of this client (such as --max-concurrency, --request-rate, --unique-ratio) or of serve.py (such as
--max-num-seqs). A fresh server is started for each value, so that none finds another's caches; with --base-url, --host
or --port the one that runs there is asked, caches and all, and the flag must be the client's.
"""

import argparse
import copy
import shlex

from benchmarks import serve
from benchmarks.cli import Report, table
from benchmarks.server import server_flags
from mini_engine.config import ConfigError

COLUMNS = {
    "completed": "done", "failed": "failed", "request_throughput": "req/s", "output_throughput": "tok/s",
    "median_ttft_ms": "TTFT p50", "p99_ttft_ms": "TTFT p99", "median_tpot_ms": "TPOT p50",
    "median_e2el_ms": "E2EL p50", "p99_e2el_ms": "E2EL p99", "start_memory_mb": "start MB", "peak_memory_mb": "peak MB",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag that varies, and those of `serve`."""
    group = parser.add_argument_group("sweep")
    group.add_argument("--flag", required=True, metavar="NAME", help="A flag of this client or of serve.py.")
    group.add_argument("--values", required=True, nargs="+", metavar="VALUE", help="A,B,C, or an argument for each.")
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Measure each value, then print the table."""
    flag = "--" + args.flag.lstrip("-").replace("_", "-")
    if not (args.base_url or args.host or args.port):
        args.launch = args.launch or ""
    values = args.values if len(args.values) > 1 else args.values[0].split(",")
    points = [_with_value(args, flag, value) for value in values]
    runs = [serve.measure(mine, f"{flag[2:]}={value}") for mine, value in zip(points, values, strict=True)]
    results = [measured.results for measured in runs]
    rows = [[value, *map(result.get, COLUMNS)] for value, result in zip(values, results, strict=True)]
    print(table([flag, *COLUMNS.values()], rows))
    failures = [failure for measured in runs for failure in measured.failures]
    return Report({"flag": flag, "values": values, "runs": results}, failures)


def _with_value(args: argparse.Namespace, flag: str, value: str) -> argparse.Namespace:
    """The flags with one value.

    Raises:
        ConfigError: no such flag, a running server cannot change its flags, or the flags do not fit each other.
    """
    mine = copy.copy(args)
    parser = argparse.ArgumentParser(prog="bench.py sweep", usage="bench.py sweep [flags]", allow_abbrev=False)
    serve.add_arguments(parser)
    _, unknown = parser.parse_known_args([f"{flag}={value}"], mine)
    if unknown and args.launch is None:
        raise ConfigError(f"--flag: {flag} is not a flag of this client; for a flag of the server, omit its address")
    if unknown:
        mine.launch = f"{mine.launch} {shlex.quote(f'{flag}={value}')}"
        server_flags("--flag", mine.launch)
    serve.check(mine)
    return mine
