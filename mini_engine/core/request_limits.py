"""Limits of a request: what an engine can hold, and whether the ranks can compute a request."""

import logging
import math

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.messages import EngineLimits, MediaItem, NewRequest, TensorHandle
from mini_engine.model.config import ModelConfig

logger = logging.getLogger(__name__)

MOST_POOLED_TOKENS = 16  # their rows of the head take less memory than the logits of a sampled token
LEAST_SNAPSHOT_INTERVAL = 256  # tokens; requests diverge at places that have snapshots of their own, seldom elsewhere


def engine_limits(
    config: EngineConfig, model: ModelConfig, num_blocks: int, device: str, num_states: int = 0
) -> EngineLimits:
    """Limits of one request: the model's, or less if the KV cache holds less. Raises ConfigError: the KV cache holds
    less than `--max-model-len`."""
    wanted = config.sequence_tokens(device, model.text.max_position_embeddings)
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and capacity < wanted:
        raise ConfigError(
            f"--max-model-len: the KV cache holds {capacity} tokens, not {wanted}; raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization, or lower it"
        )
    if capacity < wanted:
        text = "the KV cache holds %d tokens, so requests are limited to that instead of %d; "
        logger.warning(text + "raise --kv-cache-memory-bytes for more", capacity, wanted)
    interval = config.state_snapshot_interval or _snapshot_interval(capacity, num_states, config)
    return EngineLimits(
        max_model_len=min(wanted, capacity),
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_prompt_media_tokens=config.encoder_tokens(capacity),
        device=device,
        num_states=num_states,
        state_interval=interval,
    )


def _snapshot_interval(capacity: int, num_states: int, config: EngineConfig) -> int:
    """Tokens between snapshots of recurrent states, so that there are enough for all that the KV cache holds."""
    snapshots = max(1, num_states - config.step_sequences("cpu", recurrent=True))
    return -(-max(LEAST_SNAPSHOT_INTERVAL, capacity // snapshots) // config.block_size) * config.block_size


def problem_with(new: NewRequest, model: ModelConfig, limits: EngineLimits) -> str | None:
    """Why the ranks cannot compute `new`, as a text for the client; None: they can.

    API servers check the same; a rank that failed in the middle of a step would end the engine.
    """
    length, max_tokens, pooled = len(new.prompt_token_ids), new.sampling.max_tokens, new.pooling
    if not length or max_tokens < 1:
        return "the prompt is empty, or max_tokens is below 1"
    if pooled is not None and (max_tokens > 1 or new.children or len(pooled.token_ids) > MOST_POOLED_TOKENS):
        return f"pooling with several outputs, or with more than {MOST_POOLED_TOKENS} tokens"
    num_outputs = max_tokens if pooled is None else 0
    if length + num_outputs > limits.max_model_len:
        return f"{length} prompt tokens and {num_outputs} output tokens exceed {limits.max_model_len}"
    if min(new.prompt_token_ids) < 0 or max(new.prompt_token_ids) >= model.text.vocab_size:
        return f"a prompt token id is out of range [0, {model.text.vocab_size - 1}]"
    named = {*new.sampling.stop_token_ids, *new.sampling.logit_bias, *(pooled.token_ids if pooled is not None else ())}
    if named and not 0 <= min(named) <= max(named) < model.text.vocab_size:
        return f"a stop_token_ids, logit_bias or pooling token id is out of range [0, {model.text.vocab_size - 1}]"
    distinct = {item.media_hash: item.num_tokens for item in new.media}
    if sum(distinct.values()) > limits.max_prompt_media_tokens:
        return f"its media take {sum(distinct.values())} tokens, more than {limits.max_prompt_media_tokens}"
    end = 0
    for number, item in enumerate(new.media, 1):
        problem = _problem_with_item(item, end, new.prompt_token_ids, model)
        if problem is not None:
            return f"media item {number} {problem}"
        end = item.end
    placeholders = map(new.prompt_token_ids.count, (model.image_token_id, model.video_token_id))
    if sum(placeholders) != sum(item.num_tokens for item in new.media):
        return "the prompt has placeholders without media"
    return None


def _problem_with_item(item: MediaItem, earliest: int, tokens: list[int], model: ModelConfig) -> str | None:
    vision = model.vision
    _, height, width = item.grid_thw
    patches = math.prod(item.grid_thw)
    if min(item.grid_thw) < 1 or height % vision.spatial_merge_size or width % vision.spatial_merge_size:
        return f"has a grid of patches, {item.grid_thw}, that cannot be merged"
    if item.num_tokens != patches // vision.merge_unit:
        return f"has {item.num_tokens} tokens for {patches} patches"
    sent = item.patches if isinstance(item.patches, TensorHandle) else None
    if sent is not None and (sent.shape, sent.dtype) != ((patches, vision.patch_dim), "uint8"):
        return f"has patches of another shape than its grid, {item.grid_thw}"
    placeholder = model.image_token_id if item.modality == "image" else model.video_token_id
    runs = item.grid_thw[0] if item.modality == "video" and model.text.spec.text_tells_time else 1
    if len(item.offsets) != runs:
        return f"has {len(item.offsets)} runs of placeholders, not {runs}"
    for offset in item.offsets:
        run = tokens[offset : offset + item.run_length]
        if offset < earliest or run.count(placeholder) != item.run_length:
            return "does not match its placeholders"
        earliest = offset + item.run_length
    return None
