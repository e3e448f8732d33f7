"""The start of an API server's process: its first decoder, and beside that the imports of all else."""

import os

from mini_engine.config import EngineConfig
from mini_engine.launch.child import Child
from mini_engine.media.decode.decoder_pool import DecoderPool
from mini_engine.media.decode.item_limits import DecodeLimits


def run(child: Child) -> None:
    """Main function of an API server's process. Raises OSError: no decoder can be started; ConfigError: see
    `api_server.load`."""
    decoders = make_decoders(child.spec.name, child.spec.init.config)
    decoders.launch()
    from mini_engine.http import api_server

    api_server.run(child, decoders)


def make_decoders(name: str, config: EngineConfig) -> DecoderPool:
    """The decoders of the API server `name`, none of which is started yet."""
    max_decoders = max(1, len(os.sched_getaffinity(0)) // config.api_server_count)  # this server's part of the cores
    return DecoderPool(name, max_decoders, DecodeLimits.of(config), config.max_media_bytes)
