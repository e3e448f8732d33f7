"""How large each worker's KV cache is on a CPU, by flag or by the rule of docs/loading.md, "Memory on a CPU"."""

import dataclasses

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.launch.parallelism import runs_on_cpu, weight_bytes
from mini_engine.messages import MediaCachePlan
from mini_engine.model.config import ModelConfig


def settle_memory(
    config: EngineConfig, model: ModelConfig, media: MediaCachePlan, free: int
) -> tuple[EngineConfig, str]:
    """The settings with a size of the KV cache, unless a flag gives it or the workers may run on a GPU; and a line for
    the log. `free`: bytes, before the first process has started. Raises ConfigError: the size of the flag does not fit
    beside the weights."""
    if not runs_on_cpu(config):
        return config, ""
    text, engines, ranks = model.text, config.engines, config.tensor_parallel_size
    weights, itemsize = weight_bytes(config, model)
    longest = config.sequence_tokens("cpu", text.max_position_embeddings)
    blocks, layers, states = -(-longest // config.block_size), text.num_layers, 0
    if text.linear is not None:
        layers -= len(text.linear.layers)
        states = config.step_sequences("cpu", recurrent=True) * text.linear.state_bytes
    block = 2 * layers * max(1, text.num_kv_heads // ranks) * text.head_dim * itemsize * config.block_size
    given = (config.num_gpu_blocks_override or 0) * block or config.kv_cache_memory_bytes
    if given:
        _check_room(config, given, free - engines * (weights + states))
        return config, ""
    stored = media.nbytes * engines * (ranks if media.kind == "lru" else 1)
    embeddings = config.encoder_tokens(longest) * model.vision.row_size * itemsize * ranks
    left = free - stored - engines * (weights + embeddings + states)
    needed = block * blocks
    if text.linear is not None:
        needed += needed // 3  # a quarter of the cache is for snapshots
    size = max(config.cpu_cache_bytes, min(needed, left * 2 // 3 // (engines * ranks)))
    parts = ((engines * weights, "weights"), (stored, "media cache"), (engines * embeddings, "embeddings"))
    used = ", ".join(f"{name} {nbytes / 2**30:.1f}" for nbytes, name in parts)
    line = (
        f"memory: of {free / 2**30:.1f} GiB that are free, {used}; "
        f"KV cache of each worker {size / 2**30:.2f}: {needed / 2**30:.2f} for a request of {longest:,} tokens, "
        f"at most {max(0, left) * 2 / 3 / (engines * ranks) / 2**30:.2f}, two thirds of the rest"
    )
    if longest < text.max_position_embeddings and not config.max_model_len:
        line += f"; --max-model-len allows up to {text.max_position_embeddings} tokens"
    if size > config.cpu_cache_bytes:
        config = dataclasses.replace(config, kv_cache_memory_bytes=size)
    return config, line


def _check_room(config: EngineConfig, nbytes: int, left: int) -> None:
    """Raises ConfigError: KV caches of `nbytes`, which a flag gives, do not fit into the memory that is left."""
    workers = config.engines * config.tensor_parallel_size
    if nbytes * workers > left:
        flag = "--num-gpu-blocks-override" if config.num_gpu_blocks_override else "--kv-cache-memory-bytes"
        raise ConfigError(
            f"{flag}: a KV cache of {nbytes / 2**30:.1f} GiB for each of {workers} worker(s) does not fit, "
            f"{max(0, left) / 2**30:.1f} GiB of memory are free beside the weights; lower it"
        )
