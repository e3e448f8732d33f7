"""Fixtures of the API server's tests: a small model's processor and a media loader, made once, and a whole server."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mini_engine.media.loader import MediaLoader
from mini_engine.media.sources.policy import MediaPolicy
from tests.support import serving, tiny_processor
from tests.support.patience import PatientLoop
from tests.support.serving import MAX_MEDIA_BYTES, GatedProcessor, Serve, Served, SlowWeb


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": PatientLoop}


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> GatedProcessor:
    return GatedProcessor(tiny_processor.build(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
async def media(processor: GatedProcessor, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MediaLoader]:
    """Of all servers: decoder processes are slow to start. While it is open, all tests share an event loop."""
    policy = MediaPolicy(tmp_path_factory.mktemp("allowed"), MAX_MEDIA_BYTES, ["127.0.0.1"])
    made = serving.media_loader(processor, policy)
    yield made
    made.close()


@pytest.fixture
async def serve(processor: GatedProcessor, media: MediaLoader) -> Serve:
    """Starts a server with the arguments of `serving.serve`."""
    return functools.partial(serving.serve, processor, media)


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """A server with the default settings."""
    async with serve() as one:
        yield one


@pytest.fixture
def web() -> Iterator[SlowWeb]:
    with SlowWeb() as web:
        yield web
