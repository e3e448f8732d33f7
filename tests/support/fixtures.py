"""Fixtures of several folders: an API server in the test's own event loop, what it is made of, and a whole server.

They import what they need: it takes seven seconds, and pytest reads this file in each process of each run.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import PatientLoop

if TYPE_CHECKING:
    from mini_engine.media.loader import MediaLoader
    from tests.support.running_server import RunningServer
    from tests.support.serving import GatedProcessor, Serve, Served, SlowWeb


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": PatientLoop}


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> GatedProcessor:
    from tests.support import serving, tiny_processor

    return serving.GatedProcessor(tiny_processor.build(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
async def media(processor: GatedProcessor, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MediaLoader]:
    """Of all servers: decoder processes are slow to start. While it is open, all tests share an event loop."""
    from mini_engine.media.sources.policy import MediaPolicy
    from tests.support import serving

    policy = MediaPolicy(tmp_path_factory.mktemp("allowed"), serving.MAX_MEDIA_BYTES, ["127.0.0.1"])
    made = serving.media_loader(processor, policy)
    yield made
    made.close()


@pytest.fixture
async def serve(processor: GatedProcessor, media: MediaLoader) -> Serve:
    """Starts a server with the arguments of `serving.serve`."""
    from tests.support import serving

    return functools.partial(serving.serve, processor, media)


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """A server with the default settings."""
    async with serve() as one:
        yield one


@pytest.fixture
def web() -> Iterator[SlowWeb]:
    from tests.support.serving import SlowWeb

    with SlowWeb() as web:
        yield web


@pytest.fixture(scope="session")
def media_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def server(media_root: Path) -> Iterator[RunningServer]:
    """One of the bundled model, with default settings, that may read `media_root`."""
    from tests.support.running_server import RunningServer

    flags = ["--allowed-local-media-path", str(media_root), "--limit-mm-per-prompt", '{"video": 2}']
    with RunningServer(*flags) as running:
        yield running
