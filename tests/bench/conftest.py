"""One server of the bundled model for the tests that send it requests; `bench.py` inside this process, and as one of
its own that must leave nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mini_engine.bench import cli
from tests.e2e.running_server import ROOT, RunningServer, alive


@dataclass
class Ran:
    """What a run of `bench.py` left on its streams, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def last(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])

    @property
    def figures(self) -> dict[str, Any]:
        return self.last["figures"]

    def row(self, label: str) -> float:
        """The first number of a row of the table."""
        line = next(line for line in self.out.splitlines() if line.startswith(label))
        return float(line.removeprefix(label).split()[0])


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """`bench("--num-prompts", "3")` is `python bench.py --num-prompts 3`."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*flags: object) -> Ran:
        capfd.readouterr()
        status = cli.main([str(flag) for flag in flags])
        return Ran(status, *capfd.readouterr())

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Short, unlike pytest's: a server whose sockets' paths would be too long takes /tmp instead."""
    with tempfile.TemporaryDirectory(prefix="me-test-") as path:
        yield Path(path)


@pytest.fixture
def start(short_tmp: Path) -> Callable[..., subprocess.Popen[str]]:
    """`start("core", "--part", "step")` is `python bench.py core --part step`, with `short_tmp` for its files."""

    def run(*flags: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "bench.py", *map(str, flags)], cwd=ROOT, env={**os.environ, "TMPDIR": str(short_tmp)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return run


@pytest.fixture
def assert_nothing_left(short_tmp: Path) -> Callable[[Iterable[int]], None]:
    """Given what `start` has started: none of these processes lives on, and nothing lies in `short_tmp`."""

    def check(family: Iterable[int]) -> None:
        deadline = time.monotonic() + 60
        while left := [pid for pid in family if alive(pid)] + list(short_tmp.glob("mini-engine-*")):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    return check


@pytest.fixture(scope="session")
def media_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def server(media_dir: Path) -> Iterator[RunningServer]:
    """May read files below `media_dir`."""
    with RunningServer("--allowed-local-media-path", str(media_dir)) as running:
        yield running


@pytest.fixture
def root(server: RunningServer) -> str:
    """The server's URL as `--base-url` takes it."""
    return server.url.removesuffix("/v1")
