"""How large each worker's KV cache is on a CPU, by the rule of docs/loading.md, "Memory on a CPU", and whether the size
of a flag fits.
"""

import dataclasses

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.launch.plan.parallelism import ENGINE_BYTES, runs_on_cpu, weight_bytes
from mini_engine.messages import MediaCachePlan
from mini_engine.model.config import ModelConfig, TextConfig

# Of memory, for an API server and its decoders. With an engine of the smallest model, all processes together took 0.7
# GiB under load beside its KV cache.
API_SERVER_BYTES = 192 << 20


def settle_memory(
    config: EngineConfig, model: ModelConfig, media: MediaCachePlan, free: int
) -> tuple[EngineConfig, str]:
    """The settings with a size of the KV cache, unless a flag gives it or the workers may run on a GPU; and a line for
    the log. `free`: bytes, before the first process has started. Raises ConfigError: the processes, or a KV cache of
    the flag's size or for `--max-model-len`, do not fit beside the weights."""
    if not runs_on_cpu(config):
        return config, ""
    engines, ranks = config.engines, config.tensor_parallel_size
    text, (weights, itemsize) = model.text, weight_bytes(config, model)
    processes = engines * ENGINE_BYTES + config.api_server_count * API_SERVER_BYTES
    room = free - weights - processes  # at most: engines share what is not packed of the weights
    if room <= 0:
        servers = f"{config.api_server_count} API server(s)"
        used = f"weights and the processes of {engines} engine(s) and {servers} need {(free - room) / 2**30:.1f} GiB"
        remedy = "raise the memory limit, choose a smaller model or --quantization int8, or lower --data-parallel-size"
        raise ConfigError(f"out of memory: {free / 2**30:.1f} GiB are free, but {used}; {remedy}")
    check_given_cache(config, model, "cpu", free, engines * ranks)
    if config.num_gpu_blocks_override is not None:
        return config, ""
    block, states = _block_bytes(config, text, itemsize), _state_bytes(config, text, "cpu", itemsize)
    if config.kv_cache_memory_bytes is not None:
        _check_length(config, block, config.kv_cache_memory_bytes)
        return config, ""
    longest = config.sequence_tokens("cpu", text.max_position_embeddings)
    stored = media.nbytes * engines * (ranks if media.kind == "lru" else 1)
    embeddings = config.encoder_tokens(longest) * model.vision.row_size * itemsize * ranks
    left = free - stored - engines * (weights + embeddings + states)
    needed = block * -(-longest // config.block_size)
    if text.linear is not None:
        needed += needed // 3  # a quarter of the cache is for snapshots
    least = min(config.cpu_cache_bytes, room * 2 // 3 // (engines * ranks))
    size = max(least, min(needed, left * 2 // 3 // (engines * ranks)))
    _check_length(config, block, size)
    parts = ((engines * weights, "weights"), (stored, "media cache"), (engines * embeddings, "embeddings"))
    used = ", ".join(f"{name} {nbytes / 2**30:.1f}" for nbytes, name in parts)
    line = (
        f"memory: of {free / 2**30:.1f} GiB that are free, {used}; "
        f"KV cache of each worker (--kv-cache-memory-bytes) {size / 2**30:.2f}: {needed / 2**30:.2f} for a request of "
        f"{longest:,} tokens, at most {max(0, left) * 2 / 3 / (engines * ranks) / 2**30:.2f}, two thirds of the rest"
    )
    if longest < text.max_position_embeddings and not config.max_model_len:
        line += f"; --max-model-len allows up to {text.max_position_embeddings} tokens"
    if size != config.cpu_cache_bytes:
        config = dataclasses.replace(config, kv_cache_memory_bytes=size)
    return config, line


def check_given_cache(config: EngineConfig, model: ModelConfig, device: str, free: int, workers: int) -> None:
    """Raises ConfigError: KV caches of the size that a flag gives do not fit into `free` bytes beside the weights of so
    many workers on `device`, "cpu" or "cuda"."""
    weights, itemsize = weight_bytes(config, model)
    flag, given = "--kv-cache-memory-bytes", config.kv_cache_memory_bytes or 0
    if config.num_gpu_blocks_override is not None:
        flag = "--num-gpu-blocks-override"
        given = config.num_gpu_blocks_override * _block_bytes(config, model.text, itemsize)
    others = (weights + _state_bytes(config, model.text, device, itemsize)) // config.tensor_parallel_size
    left = free - workers * others
    if given * workers > max(0, left):
        raise ConfigError(
            f"{flag}: a KV cache of {given / 2**30:.1f} GiB for each of {workers} worker(s) does not fit, "
            f"{max(0, left) / 2**30:.1f} GiB of memory are free beside the weights; lower it"
        )


def _check_length(config: EngineConfig, block: int, size: int) -> None:
    """Raises ConfigError: a KV cache of `size` bytes in blocks of `block` bytes holds less than `--max-model-len`. An
    engine core checks the blocks that its workers have, but only after they have loaded the weights."""
    needed = block * -(-(config.max_model_len or 0) // config.block_size)
    if size < needed:
        raise ConfigError(
            f"--max-model-len: {config.max_model_len} tokens need {needed / 2**30:.2f} GiB of KV cache in each worker, "
            f"not {size / 2**30:.2f}; raise --kv-cache-memory-bytes, or lower it"
        )


def check_in_worker(config: EngineConfig, model: ModelConfig, device: str, free: int) -> None:
    """As `check_given_cache`, when the worker has chosen its device: of other workers there memory may be in use
    already. Not where `settle_memory` has checked, which may set a size for which not all recurrent states are used."""
    if device != "cpu" or not runs_on_cpu(config):
        check_given_cache(config, model, device, free, workers=1)


def _block_bytes(config: EngineConfig, text: TextConfig, itemsize: int) -> int:
    """Of a block of one worker's KV cache."""
    layers = text.num_layers - (len(text.linear.layers) if text.linear is not None else 0)
    heads = max(1, text.num_kv_heads // config.tensor_parallel_size)
    return 2 * layers * heads * text.head_dim * itemsize * config.block_size


def _state_bytes(config: EngineConfig, text: TextConfig, device: str, itemsize: int) -> int:
    """Of an engine's recurrent states, without snapshots."""
    return config.step_sequences(device, recurrent=True) * text.linear.nbytes(itemsize) if text.linear else 0
