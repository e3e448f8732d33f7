"""What the configuration and the model allow: in one step, and to one request."""

from __future__ import annotations

import logging

from mini_engine.config import EngineConfig
from mini_engine.core.scheduler import Budgets
from mini_engine.messages import EngineLimits
from mini_engine.model.config import ModelConfig

logger = logging.getLogger(__name__)


def budgets(config: EngineConfig) -> Budgets:
    """The bounds of a step."""
    return Budgets(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_num_encoder_input_tokens or config.max_num_batched_tokens,
        config.long_prefill_token_threshold,
    )


def engine_limits(config: EngineConfig, model: ModelConfig, num_blocks: int) -> EngineLimits:
    """What one request may ask for: what the model was made for, or less if the caches hold less."""
    wanted = config.max_model_len or model.text.max_position_embeddings
    capacity = num_blocks * config.block_size
    if capacity < wanted:
        logger.warning(
            "the KV cache holds %d tokens, so requests are limited to that instead of %d; "
            "raise --kv-cache-memory-bytes for more", capacity, wanted,
        )  # fmt: skip
    per_prompt = config.encoder_cache_tokens
    per_item = min(config.max_num_encoder_input_tokens or per_prompt, per_prompt)
    return EngineLimits(min(wanted, capacity), num_blocks, config.block_size, per_item, per_prompt)
