"""Regime `transport`: what it takes to bring a tensor from one process into T others, by each placement of the queue.

The regime. A uint8 tensor lies in this process, which stands in for an API server and for the engine core; T further
processes, each with the workers' own receiver, stand in for the ranks. A transfer begins with the tensor and ends when
every rank's receiver has reported it and its main thread has touched every page of it; then the rank computes its
CRC-32, which must be this payload's. Repeats, T and placements take turns, so that drift of the machine hits all alike:
    memcpy    the payload once, by one thread, between two buffers that have all their pages
    reserve   room for the message
    copy      the tensor into the arena (torch_shm); nothing is copied for direct_rpc
    send      the message's head, and as many of the bytes as the socket takes at once, handed to each rank's stream
    arrive    from there until the last rank's report is here
    touch     one byte of every page, in the rank
    total     reserve + copy + send + arrive + touch
    checksum  shown apart: it is the proof, not the transfer
Memory: cold is the first message of a new arena, whose pages have no memory yet; reused is its second, in the same
pages, as it is in a server that has been up for a while. With direct_rpc each message has fresh heap memory.

What it should cost. torch_shm, reused: one memcpy, whatever T is, plus two wake-ups (the rank's receiver, this process)
of 0.1 ms or so each, which rule below 4 MB. Cold adds the kernel's work for each page of 4 kB: it is allocated, zeroed
and entered into the page table here and in each rank, 0.5 us in all, and several times that in a virtual machine.
direct_rpc: for each rank one copy into the socket, in portions with a system call each, and one out of it into memory
whose pages are new: 2 T memcpys at the very least, and several times that with the page faults. shm_store, the media
store: as torch_shm, without the wake-ups, since its handles travel with the request.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from mini_engine.bench.parser import at_least, real
from mini_engine.bench.report import Report, say, table
from mini_engine.stdout import tell

HELP = "tensors from one process into all ranks, by each placement of the tensor queue"
MB = 1 << 20
MEMCPYS = {"torch_shm": 2.0, "shm_store": 1.3}  # goals of a transfer through memory that is reused, from 16 MB on
PARTS = ("reserve", "copy", "send", "arrive", "touch", "total", "checksum")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The regime's flags."""
    parser.add_argument(
        "--payloads", type=_positive, nargs="+", default=[1, 4, 16, 64, 256], metavar="MB",
        help="Sizes in MB of 2**20 bytes, fractions too (default: 1 4 16 64 256).",
    )  # fmt: skip
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2], metavar="T", help="Default: 1 2.")
    parser.add_argument("--repeats", type=at_least(1), default=7, help="Times; medians count (default: 7).")


def run(args: argparse.Namespace) -> Report:
    """Measure everything and print the table."""
    figures = measure(sorted(set(args.payloads)), sorted(set(args.ranks)), args.repeats)
    return Report(figures, tell(describe(figures)))


def measure(payloads: list[float], ranks: list[int], repeats: int) -> dict[str, Any]:
    """The figures, in milliseconds.

    Raises:
        BenchError: a rank died, or a transfer failed or brought other bytes.
    """
    from mini_engine.bench.transport_transfer import WAYS, Payload, Ranks, Transfer

    rows: list[dict[str, Any]] = []
    with Ranks(max(ranks)) as running:
        for megabytes in payloads:
            say(f"{megabytes:g} MB", "transport")
            payload = Payload(max(int(megabytes * MB), 1))
            payload.memcpy()
            memcpy: list[float] = []
            samples: dict[tuple[str, str, int], list[Transfer]] = {}
            for _ in range(repeats):
                for count in ranks:
                    for way in WAYS:
                        memcpy.append(payload.memcpy())
                        for buffer, transfer in zip(way.buffers, running.transfers(way, count, payload), strict=True):
                            samples.setdefault((way.name, buffer, count), []).append(transfer)
            rows += [_row(megabytes, key, found, memcpy) for key, found in samples.items()]
    return {"repeats": repeats, "rows": rows, "goals": [dataclasses.asdict(goal) for goal in goals(rows)]}


def _row(megabytes: float, key: tuple[str, str, int], found: list[Any], copies: list[float]) -> dict[str, Any]:
    memcpy = statistics.median(copies)
    medians = {part: statistics.median(getattr(transfer, part) for transfer in found) for part in PARTS}
    transport, buffer, count = key
    return {
        "payload_mb": megabytes,
        "transport": transport,
        "buffer": buffer,
        "ranks": count,
        "memcpy_ms": round(1000 * memcpy, 4),
        **{f"{part}_ms": round(1000 * seconds, 4) for part, seconds in medians.items()},
        "total_over_memcpy": round(medians["total"] / memcpy, 3),
        "best_over_memcpy": round(min(transfer.total for transfer in found) / min(copies), 3),
    }


@dataclasses.dataclass(frozen=True)
class Goal:
    """Something this project promises, and what was found."""

    what: str
    limit: float
    found: float
    met: bool


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Those that the measured payloads and ranks can tell of."""
    by_key = {(row["transport"], row["buffer"], row["payload_mb"], row["ranks"]): row for row in rows}
    found: list[Goal] = []
    for (transport, buffer, megabytes, count), row in by_key.items():
        if buffer != "reused" or megabytes < 16:
            continue
        here = f"{transport}, reused, {megabytes:g} MB"
        found.append(_at_most(f"{here}, T={count}: total / memcpy", MEMCPYS[transport], row["total_over_memcpy"]))
        single, rpc = by_key.get((transport, buffer, megabytes, 1)), by_key.get(("direct_rpc", "fresh", megabytes, 2))
        if count == 2 and single is not None:
            found.append(_at_most(f"{here}: T=2 / T=1", 1.1, row["total_ms"] / single["total_ms"]))
        if count == 2 and megabytes == 64 and rpc is not None:
            faster = round(rpc["total_ms"] / row["total_ms"], 3)
            found.append(Goal(f"{here}, T=2: direct_rpc / {transport}, at least", 3.0, faster, faster >= 3.0))
    return found


def _at_most(what: str, limit: float, value: float) -> Goal:
    return Goal(f"{what}, at most", limit, round(value, 3), value <= limit)


def describe(figures: dict[str, Any]) -> str:
    """The table for people."""
    lines = [
        [f"{row['payload_mb']:g} MB", row["transport"], row["buffer"], row["ranks"], row["memcpy_ms"],
         *(row[f"{part}_ms"] for part in PARTS[:-1]), row["total_over_memcpy"], row["best_over_memcpy"],
         row["checksum_ms"]]
        for row in figures["rows"]
    ]  # fmt: skip
    head = ["payload", "transport", "buffers", "T", "memcpy", *PARTS[:-1], "total/memcpy", "best/memcpy", "checksum"]
    wanted = [[g["what"], g["limit"], g["found"], "yes" if g["met"] else "no"] for g in figures["goals"]]
    return "\n".join(
        [
            "",
            "transport: a tensor in one process becomes a tensor in T others, whose checksum each has verified",
            f"Milliseconds, medians of {figures['repeats']} transfers; of T ranks the slowest counts.",
            "memcpy: the payload once between prefaulted buffers. arrive: from the send to the last rank's report.",
            "total: reserve + copy + send + arrive + touch (a byte of every page); the checksum is not part of it.",
            "best/memcpy: the fastest transfer to the fastest memcpy, for a machine that is busy with other things.",
            "cold: first use of the arena's pages; reused: their second; fresh: heap memory, new for each message.",
            "",
            table(head, lines),
            *(["", table(["goal", "limit", "found", "met"], wanted)] if wanted else []),
        ]
    )


def _positive(text: str) -> float:
    value = real(text)
    if not 0 < value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} is no size in MB")
    return value
