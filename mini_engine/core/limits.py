"""What the configuration and the model allow: in one step, and to one request."""

from __future__ import annotations

import logging

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.core.scheduler import Budgets
from mini_engine.messages import EngineLimits
from mini_engine.model.config import ModelConfig

logger = logging.getLogger(__name__)


def budgets(config: EngineConfig, device: str) -> Budgets:
    """The bounds of a step on `device`, "cpu" or "cuda"."""
    max_tokens = config.step_tokens(device)
    long_prefill = config.long_prefill_token_threshold
    return Budgets(
        config.max_num_seqs,
        max_tokens,
        config.step_media_tokens(device),
        max(1, max_tokens // 2) if long_prefill is None else long_prefill,
    )


def engine_limits(config: EngineConfig, model: ModelConfig, num_blocks: int, device: str) -> EngineLimits:
    """What one request may ask for: what the model was made for, or less if the KV cache holds less.

    Raises:
        ConfigError: the KV cache holds less than `--max-model-len` asks for.
    """
    wanted = config.sequence_tokens(model.text.max_position_embeddings)
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and capacity < wanted:
        raise ConfigError(
            f"--max-model-len: the KV cache holds {capacity} tokens, not {wanted}; raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization, or lower it"
        )
    if capacity < wanted:
        logger.warning(
            "the KV cache holds %d tokens, so requests are limited to that instead of %d; "
            "raise --kv-cache-memory-bytes for more", capacity, wanted,
        )  # fmt: skip
    return EngineLimits(min(wanted, capacity), num_blocks, config.block_size, config.encoder_cache_tokens, device)
