"""What the processes of a server hold: descriptors, shared mappings, what they count themselves, and the gauges."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.barriers import Inside, eventually
from tests.e2e.pinned import call
from tests.e2e.running_server import RunningServer, figures

# Each is 0 when no request is there.
GAUGES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "ipc_buffered_bytes", "mm_cache_references",
)  # fmt: skip

DECODER_DESCRIPTORS = 3  # of each decoder in its API server


def samples(server: RunningServer, title: str) -> dict[str, float]:
    """`/metrics` as one API server shows it, by name with labels, without the prefix."""
    lines = figures(lambda: call(server, title, "GET", "/metrics")).splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name.removeprefix("mini_engine:"): float(value) for name, _, value in pairs}


def total(shown: dict[str, float], name: str) -> float:
    """A metric of `samples`, summed over its labels."""
    found = [value for key, value in shown.items() if key.partition("{")[0] == name]
    assert found, f"/metrics has no {name}"
    return sum(found)


def decoders(pid: int) -> list[int]:
    """The decoder processes of an API server, those that start too. Other processes have none."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in children if b"decoder" in Path(f"/proc/{child}/cmdline").read_bytes()]


def descriptors(pid: int) -> int:
    """But for those that belong to decoders, whose number varies."""
    return len(os.listdir(f"/proc/{pid}/fd")) - DECODER_DESCRIPTORS * len(decoders(pid))


def memory(pid: int, name: str) -> int:
    """`VmRSS` is what a process has, `VmHWM` the most it ever had, `RssAnon` and `RssShmem` parts of the
    former, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)[1]) << 10


def mappings(pid: int) -> int:
    """Of shared memory that the package has made, but for one of each decoder."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:mini-engine" in line for line in maps) - len(decoders(pid))


def assert_nothing_held(server: RunningServer, inside: Inside, witness: str, titles: Iterable[str]) -> None:
    """By the gauges that the API server `witness` shows, and by the count of each process, no request is there."""
    shown = samples(server, witness)
    left: dict[str, object] = {name: value for name in GAUGES if (value := total(shown, name))}
    pids = server.pids()
    for title in titles:
        held = inside.figures(pids[title])["held"]
        left |= {f"{title}: {name}": value for name, value in held.items() if value}
    assert not left, left


def holdings(server: RunningServer, inside: Inside) -> dict[str, dict[str, int]]:
    """All that each process holds and keeps, by its title."""
    state = {}
    for title, pid in server.pids().items():
        state[title] = {"descriptors": descriptors(pid), "mappings": mappings(pid)}
        if title != "supervisor":
            counted = inside.figures(pid)
            state[title] |= counted["held"] | counted["kept"]
    return state


def assert_at_rest(server: RunningServer) -> None:
    """All that a request holds is back."""
    held = ("mini_engine:num_requests_running", "mini_engine:num_requests_waiting", "mini_engine:ipc_buffered_bytes")

    def check() -> None:
        left = {name: value for name, value in server.metrics().items() if name.startswith(held) and value}
        assert not left

    eventually(check)
