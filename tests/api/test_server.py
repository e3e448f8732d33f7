"""What an API server's process loads, and which settings it refuses to start with."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_engine.api import server
from mini_engine.api.protocol import ChatMessage
from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.decode_limits import DecodeLimits
from mini_engine.messages import Init, MediaCachePlan


@contextlib.contextmanager
def loaded(model_dir: str = BUNDLED_MODEL, **settings: Any) -> Iterator[server.ModelFront]:
    no_cache = MediaCachePlan("off", 0, "")
    init = Init(EngineConfig(**settings), model_dir, "", cores=[], core_workers=[], ranks=[], media_cache=no_cache)
    front = server.load(init, 0)
    yield front
    front.media.close()


def test_settings_reach_the_media_path(tmp_path: Path) -> None:
    (template := tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    limits = {
        "max_video_frames": 1001, "max_video_frames_kept": 101, "max_video_seconds": 11.5, "max_frame_pixels": 10001,
        "max_video_pixels_kept": 100001, "media_decode_timeout": 1.5, "max_image_pixels": 20001,
        "media_decoder_memory": 123 << 20,
    }  # fmt: skip
    settings = {
        "chat_template": str(template),
        "media_io_kwargs": {"video": {"fps": 3}},
        "allowed_local_media_path": str(tmp_path),
        "max_media_bytes": 1000,
    }
    with loaded(**settings, **limits) as front:
        assert front.media_settings.server.sampling.fps == 3
        assert front.media.policy.allowed_local_media_path == tmp_path
        assert front.media.policy.max_media_bytes == 1000
        assert front.media.decoders.limits == DecodeLimits(**limits)
        assert front.vocab_size == 768
        tokens = front.renderer.render([ChatMessage(role="user", content="hello")])
        assert front.processor.hf_processor.tokenizer.decode(tokens) == "hello!"
    with loaded() as front:
        assert front.media.decoders.limits == DecodeLimits()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"added_tokens": 3}'),
        ("processor_config.json", '{"processor_class": 3}'),
    ],
)
def test_damaged_files_are_refused_in_one_line(name: str, text: str, tmp_path: Path) -> None:
    copy = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    (copy / name).write_text(text)
    with pytest.raises(ConfigError, match="files from where the model is from") as caught, loaded(str(copy)):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"media_io_kwargs": {"video": {"fps": 3}}, "mm_processor_kwargs": {"num_frames": 2}}, "exactly one of"),
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
