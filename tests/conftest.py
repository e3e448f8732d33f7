"""What tests of several folders share: a short directory for sockets, and a ZMQ context."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name (107 bytes in all)."""
    path = Path(tempfile.mkdtemp(prefix="mini-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)
