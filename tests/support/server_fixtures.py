"""One server of the bundled model for all tests that do not need their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.running_server import RunningServer


@pytest.fixture(scope="session")
def media_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def server(media_root: Path):
    """A server with default settings that may read `media_root`."""
    with RunningServer(
        "--allowed-local-media-path", str(media_root), "--limit-mm-per-prompt", '{"video": 2}'
    ) as running:
        yield running
