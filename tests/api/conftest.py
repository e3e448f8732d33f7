"""Fixtures of the API server's tests: a small model's processor, loaded once, and a whole server with it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_engine.media.processor import MediaProcessor
from tests import tiny_processor
from tests.api import serving
from tests.api.patience import PatientLoop
from tests.api.serving import Serve, Served, SlowWeb


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": PatientLoop}


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    return MediaProcessor(tiny_processor.build(tmp_path_factory.mktemp("model")))


@pytest.fixture
def serve(processor: MediaProcessor, tmp_path: Path) -> Serve:
    """Starts a server with the arguments of `serving.serve`."""
    return functools.partial(serving.serve, processor, tmp_path)


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """A server with the default settings."""
    async with serve() as one:
        yield one


@pytest.fixture
def web() -> Iterator[SlowWeb]:
    with SlowWeb() as web:
        yield web
