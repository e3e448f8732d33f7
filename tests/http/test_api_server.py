"""What an API server's process loads, and which settings it refuses to start with."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.http import api_server as server
from mini_engine.http.api_process import make_decoders
from mini_engine.media.decode.item_limits import DecodeLimits
from mini_engine.messages import Init, MediaCachePlan
from mini_engine.protocol.bodies import ChatMessage, ChatRequest


@contextlib.contextmanager
def loaded(**settings: Any) -> Iterator[server.ModelAssets]:
    no_cache = MediaCachePlan("off", 0, "")
    init = Init(EngineConfig(**settings), BUNDLED_MODEL, "", cores=[], core_workers=[], ranks=[], media_cache=no_cache)
    assets = server.load(init, 0, make_decoders("api 0", init.config))
    yield assets
    assets.media_loader.close()


def test_settings_reach_the_media_path(tmp_path: Path) -> None:
    (template := tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    limits = {field.name: 2 * getattr(EngineConfig, field.name) for field in dataclasses.fields(DecodeLimits)}
    settings = {
        "chat_template": str(template),
        "media_io_kwargs": {"video": {"fps": 3}},
        "allowed_local_media_path": str(tmp_path),
        "max_media_bytes": 1000,
    }
    with loaded(**settings, **limits) as assets:
        assert assets.media_settings.server.sampling.fps == 3
        assert assets.media_loader.policy.allowed_local_media_path == tmp_path
        assert assets.media_loader.policy.max_media_bytes == 1000
        assert assets.media_loader.decoders.limits == DecodeLimits.of(EngineConfig(**limits))
        assert assets.vocab_size == 768
        tokens = assets.renderer.render(ChatRequest(messages=[ChatMessage(role="user", content="hello")])).token_ids
        assert assets.renderer.tokenizer.decode(tokens) == "hello!"
    with loaded() as assets:
        assert assets.media_loader.decoders.limits == DecodeLimits.of(EngineConfig())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"media_io_kwargs": {"video": {"fps": 3, "num_frames": 2}}}, "--media-io-kwargs.*: set exactly one of"),
        ({"media_io_kwargs": {"video": {"frames": 3}}}, "frames"),
        ({"allowed_media_domains": ["*.example.com"]}, "--allowed-media-domains"),
        ({"allowed_media_domains": ["10.0.0.0/8"]}, "a network needs a host name beside it"),
        ({"mm_processor_kwargs": {"do_rescale": True}}, "--mm-processor-kwargs"),
        ({"generation_config": "/nowhere"}, "--generation-config"),
    ],
)
def test_settings_that_cannot_be_served_with(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), loaded(**settings):
        pass
