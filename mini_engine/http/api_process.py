"""The start of an API server's process: its first decoder, and beside that the imports of all else."""

import os
from dataclasses import fields

from mini_engine.config import EngineConfig
from mini_engine.config.decode_limits import DecodeLimits
from mini_engine.launch.child import Child
from mini_engine.media.decode.decoder_pool import DecoderPool


def run(child: Child) -> None:
    """Main function of an API server's process. Raises OSError: no decoder can be started; ConfigError: see
    `api_server.load`."""
    decoders = make_decoders(child.spec.name, child.spec.init.config)
    decoders.launch()
    from mini_engine.http import api_server

    api_server.run(child, decoders)


def make_decoders(name: str, config: EngineConfig) -> DecoderPool:
    """The decoders of the API server `name`, none of which is started yet."""
    places = max(1, len(os.sched_getaffinity(0)) // config.api_server_count)  # this server's part of the cores
    limits = DecodeLimits(**{field.name: getattr(config, field.name) for field in fields(DecodeLimits)})
    return DecoderPool(name, places, limits, config.max_media_bytes)
