"""One server of the bundled model for the tests that send it requests, and `bench.py` inside this process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mini_engine.bench import cli
from tests.e2e.running_server import RunningServer


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
