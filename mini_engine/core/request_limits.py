"""Limits of a request: what an engine can hold. API servers refuse requests that exceed them, by the same limits."""

import logging

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.messages import EngineLimits
from mini_engine.model.config import ModelConfig

logger = logging.getLogger(__name__)


def engine_limits(
    config: EngineConfig, model: ModelConfig, num_blocks: int, device: str, num_states: int = 0
) -> EngineLimits:
    """Limits of one request: the model's, or less if the KV cache holds less. Raises ConfigError: the KV cache holds
    less than `--max-model-len`."""
    wanted = config.sequence_tokens(device, model.text.max_position_embeddings)
    capacity = num_blocks * config.block_size
    flag = "--kv-cache-memory-bytes" + " or --gpu-memory-utilization" * (device == "cuda")
    if config.num_gpu_blocks_override is not None:
        flag = "--num-gpu-blocks-override"
    if config.max_model_len is not None and capacity < wanted:
        raise ConfigError(
            f"--max-model-len: the KV cache holds {capacity} tokens, not {wanted}; raise {flag}, or lower it"
        )
    if capacity < wanted:
        text = "the KV cache holds %d tokens, so requests are limited to that instead of %d; raise %s for more"
        logger.warning(text, capacity, wanted, flag)
    return EngineLimits(
        max_model_len=min(wanted, capacity),
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_prompt_media_tokens=config.encoder_tokens(capacity),
        device=device,
        num_states=num_states,
    )
