"""What the configuration and the model allow."""

from __future__ import annotations

import pytest

from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.core.limits import engine_limits
from mini_engine.model.config import ModelConfig

MODEL = ModelConfig.from_dir(BUNDLED_MODEL)


def test_a_length_that_the_cache_holds():
    limits = engine_limits(EngineConfig(max_model_len=64), MODEL, num_blocks=4, device="cpu")
    assert (limits.max_model_len, limits.num_blocks, limits.device) == (64, 4, "cpu")


def test_a_length_that_was_asked_for_and_cannot_be_had_is_an_error():
    with pytest.raises(
        ConfigError, match="--max-model-len: the KV cache holds 64 tokens, not 65; raise .* or lower it"
    ):
        engine_limits(EngineConfig(max_model_len=65), MODEL, num_blocks=4, device="cpu")


def test_the_models_own_length_is_cut_to_what_the_cache_holds(caplog):
    assert engine_limits(EngineConfig(), MODEL, num_blocks=4, device="cuda").max_model_len == 64
    assert "limited to that instead of 65536" in caplog.text
