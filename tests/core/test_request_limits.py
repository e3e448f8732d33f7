"""Limits of an engine."""

import pytest

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.core.request_limits import engine_limits
from tests.support.simulated_core import MODEL


def test_max_model_len_beyond_the_kv_cache_is_an_error_if_set_else_reduced(caplog):
    assert engine_limits(EngineConfig(max_model_len=64), MODEL, num_blocks=4, device="cpu").max_model_len == 64
    assert not caplog.text
    assert engine_limits(EngineConfig(), MODEL, num_blocks=4, device="cuda").max_model_len == 64
    assert "limited to that instead of 65536" in caplog.text
    for flag, given in (("--kv-cache-memory-bytes", None), ("--num-gpu-blocks-override", 4)):
        config = EngineConfig(max_model_len=65, num_gpu_blocks_override=given)
        with pytest.raises(ConfigError, match=f"the KV cache holds 64 tokens, not 65; raise {flag}, or lower it"):
            engine_limits(config, MODEL, num_blocks=4, device="cpu")
