"""The engine core's time for one item of the media store, by the number of cached items: a `Reserve` and a `Lookup`.

Items of one page fill the store and are used in random order, so that each `Reserve` evicts one anywhere. The garbage
collector is off, as in the engine core. Messages are not part of the time.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path

import numpy as np

from benchmarks.cli import Report, table
from mini_engine.core.media_store import MediaStore
from mini_engine.messages import CachedMedia
from mini_engine.transport.pages import PAGE_BYTES

CALLS = 1000
OWNER = (1, "request")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--items", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000], metavar="N",
        help="Numbers of cached items (default: 10 100 1000 10000 100000).")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="Plot the times to a file, such as out.png.")


def run(args: argparse.Namespace) -> Report:
    """Measure each number of items, then print the table and draw the plot."""
    gc.disable()
    rows = [measure(count) for count in args.items]
    gc.enable()
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    if args.plot is not None:
        from benchmarks import plot

        curves = {key: [row[key] for row in rows] for key in rows[0] if key != "items"}
        plot.draw_curves("cached items", args.items, {"us": curves}, args.plot)
    return Report({"rows": rows})


def measure(count: int) -> dict[str, float]:
    """Microseconds with `count` items."""
    rng, store = random.Random(0), MediaStore(count * PAGE_BYTES, PAGE_BYTES, lambda: 1 << 60)
    items = [CachedMedia(rng.randbytes(16), "image", 1, (1, 1, 1), None) for _ in range(count + CALLS)]
    for item in items[:count]:
        store.written(store.reserve(OWNER, item).number, [])
    seconds: dict[str, list[float]] = {"reserve": [], "look_up": []}
    for item in [*rng.sample(items[:count], count), *rng.choices(items[:count], k=CALLS)]:
        begun = time.perf_counter()
        store.look_up(OWNER, [item.media_hash])
        seconds["look_up"].append(time.perf_counter() - begun)
        store.release_request(OWNER)
    for item in items[count:]:
        begun = time.perf_counter()
        reserved = store.reserve(OWNER, item)
        seconds["reserve"].append(time.perf_counter() - begun)
        store.written(reserved.number, [])
    assert store.num_evictions == CALLS
    times = {f"{call}_p{p}_us": 1e6 * float(np.percentile(seconds[call], p)) for call in seconds for p in (50, 99)}
    return {"items": count, **times}
