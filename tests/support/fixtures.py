"""Fixtures of several folders: an API server in the test's own event loop, what it is made of, a whole server, and the
device of a test of kernels.

They import what they need: it takes seven seconds, and pytest reads this file in each process of each run.
"""

import functools

import pytest

from tests.support.devices import DEVICES
from tests.support.patience import PatientLoop


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio", {"loop_factory": PatientLoop}


@pytest.fixture(scope="session")
def processor(tmp_path_factory):
    from tests.support import serving, tiny_processor

    return serving.GatedProcessor(tiny_processor.build(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
async def media(processor, tmp_path_factory):
    """Of all servers, with two threads and up to two decoder processes, which are slow to start. While it is open, all
    tests share an event loop."""
    from mini_engine.config import EngineConfig
    from mini_engine.media.decode.decoder_pool import DecoderPool
    from mini_engine.media.decode.item_limits import DecodeLimits
    from mini_engine.media.loader import MediaLoader
    from mini_engine.media.sources.policy import MediaPolicy
    from tests.support import serving

    policy = MediaPolicy(tmp_path_factory.mktemp("allowed"), serving.MAX_MEDIA_BYTES, ["127.0.0.1"])
    decoders = DecoderPool("served", 2, DecodeLimits.of(EngineConfig()), policy.max_media_bytes)
    made = MediaLoader(processor, policy, decoders, 2, False)
    yield made
    made.close()


@pytest.fixture
async def serve(processor, media):
    """Starts a server with the arguments of `serving.serve`."""
    from tests.support import serving

    return functools.partial(serving.serve, processor, media)


@pytest.fixture
async def served(serve):
    """A server with the default settings."""
    async with serve() as one:
        yield one


@pytest.fixture
def web():
    from tests.support.serving import SlowWeb

    with SlowWeb() as web:
        yield web


@pytest.fixture(scope="session")
def media_root(tmp_path_factory):
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def server(media_root):
    """One of the bundled model, with default settings, that may read `media_root`."""
    from tests.support.running_server import RunningServer

    flags = ["--allowed-local-media-path", str(media_root), "--limit-mm-per-prompt", '{"video": 2}']
    with RunningServer(*flags) as running:
        yield running


@pytest.fixture(params=DEVICES)
def device(request):
    import torch

    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
