"""The start-up checks: host, model, device, memory and TLS files; and which settings have no effect here."""

import importlib.metadata
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec

from mini_engine.config import ConfigError, EngineConfig, flag_of
from mini_engine.free_memory import available_memory
from mini_engine.launch.plan import parallelism
from mini_engine.messages import EngineLimits, MediaCachePlan
from mini_engine.model.config import ModelConfig
from mini_engine.model.quantization import weight_bits

logger = logging.getLogger(__name__)

DEFAULT_MEDIA_CACHE_BYTES = 4 << 30
PROC_FILES = [Path("/proc", name) for name in ("self/stat", "meminfo", "cpuinfo")]
# By which processes share memory, and are watched.
SYSTEM_CALLS: dict[str, Callable[[], int]] = {
    "memfd_create": lambda: os.memfd_create("mini-engine"),
    "pidfd_open": lambda: os.pidfd_open(os.getpid()),
}


def check_host() -> None:
    """Raises ConfigError: a part of /proc, a system call or the working directory, without which no process runs, is
    not there or denied, as in some containers."""
    errors = []
    for path in PROC_FILES:
        try:
            path.read_bytes()
        except OSError as error:
            remedy = "mount the whole of /proc (systemd: ProcSubset=all)"
            errors.append(f"{path} cannot be read ({error.strerror}): {remedy}")
    for name, call in SYSTEM_CALLS.items():
        try:
            os.close(call())
        except OSError as error:
            remedy = "it needs Linux 5.3 or later, and a seccomp profile that allows it"
            errors.append(f"the system call {name} fails ({error.strerror}): {remedy}")
    try:
        os.getcwd()
    except OSError as error:
        errors.append(f"the working directory cannot be read ({error.strerror}): start the server in another")
    if errors:
        raise ConfigError("\n".join(errors))


def check_device_and_tls(config: EngineConfig) -> None:
    """Raises ConfigError: for `--device cuda` no GPU is in sight, or torch is built without CUDA (the workers find out
    whether the two work together); the files of `--ssl-keyfile` and `--ssl-certfile` are no key and its certificate, or
    the key is encrypted."""
    errors, torch_version = [], importlib.metadata.version("torch")
    if config.device == "cuda" and (not parallelism.has_gpu() or torch_version.endswith("+cpu")):
        reason = f"torch {torch_version} is built without CUDA" if parallelism.has_gpu() else "no GPU in /dev"
        errors.append(f"--device cuda: {reason}; choose --device cpu or auto, or give a container its GPUs")

    def refuse_password() -> str:
        raise ConfigError("--ssl-keyfile: the key is encrypted; decrypt it: openssl pkey -in KEY -out DECRYPTED")

    try:
        if config.ssl_certfile is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, refuse_password)
    except ConfigError as error:
        errors.append(str(error))
    except OSError as error:
        reason = error.strerror or str(error)
        errors.append(f"--ssl-keyfile, --ssl-certfile: {reason}; give a key and its certificate as PEM files")
    if errors:
        raise ConfigError("\n".join(errors))


def resolve_model(config: EngineConfig) -> str:
    """The local directory of MODEL; a hub name is downloaded once, here, or taken from the hub's cache.
    Raises ConfigError: no such directory and no such model on the hub, or with HF_HUB_OFFLINE in its cache."""
    if Path(config.model).is_dir():
        return str(Path(config.model).resolve())
    unavailable = f"{config.model!r} is neither a directory nor an available hub model"
    if Path(config.model).exists():
        raise ConfigError(f"{unavailable}: it is a file; give the directory that has config.json")
    if config.model.startswith(("/", ".", "~")):  # no hub name
        raise ConfigError(f"{unavailable}: there is no such path")
    weights = [] if config.load_format == "dummy" else ["*.safetensors"]
    logger.info("%s is not a directory: loading it from the hub or the hub's cache", config.model)
    import huggingface_hub as hub

    files = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", *weights]
    try:
        return hub.snapshot_download(config.model, revision=config.revision, allow_patterns=files)
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{unavailable}: {reason}") from None


def check_model(model_dir: str, config: EngineConfig) -> ModelConfig:
    """The model's own configuration. The workers find what is wrong with the weights. Raises ConfigError: a file is
    missing, the architecture or quantization is not supported, the heads cannot be divided among the workers, or the
    context is shorter than `--max-model-len`."""
    try:
        model = ModelConfig.from_dir(model_dir)
        weight_bits(config.quantization, model.quantization)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model in {model_dir} cannot be served: {error}") from None
    _check_tokenizer(Path(model_dir) / "tokenizer.json")
    text, vision_heads, longest = model.text, model.vision.num_heads, model.text.max_position_embeddings
    heads, kv_heads, recurrent_heads = text.num_heads, text.num_kv_heads, text.linear.k_heads if text.linear else 0
    ranks = config.tensor_parallel_size
    tower_ranks, whole_tower = ranks if config.mm_encoder_tp_mode == "weights" else 1, "--mm-encoder-tp-mode data"
    for uneven, remedy in (
        (heads % ranks, f"a divisor of {heads}, the number of attention heads"),
        (kv_heads % ranks and ranks % kv_heads, f"a divisor or multiple of {kv_heads}, the number of key-value heads"),
        (vision_heads % tower_ranks, f"a divisor of {vision_heads}, the number of vision heads, or {whole_tower}"),
        (recurrent_heads % ranks, f"a divisor of {recurrent_heads}, the number of key heads of recurrent layers"),
    ):
        if uneven:
            raise ConfigError(f"--tensor-parallel-size: heads cannot be divided by {ranks}; choose {remedy}")
    if (config.max_model_len or 0) > longest:
        raise ConfigError(f"--max-model-len: {config.max_model_len} exceeds the model's context length, {longest}")
    return model


def _check_tokenizer(path: Path) -> None:
    """Here, since each process that loads it, in seconds, would report the same."""
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}; write it with `save_pretrained` of the tokenizer")
    try:
        msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check its permissions and its disk") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is truncated or not a JSON object ({error}); download it again") from None


def without_effect(config: EngineConfig, cache: MediaCachePlan, limits: EngineLimits) -> list[str]:
    """A text for each setting that is not the default and changes nothing on this device, with this model, or beside
    others."""
    on_cpu, alone = limits.device == "cpu", config.tensor_parallel_size == 1
    kv_bytes = config.kv_cache_memory_bytes is not None
    sizes = any(isinstance(limit, dict) and limit.keys() - {"count"} for limit in config.limit_mm_per_prompt.values())
    cases = [
        ("gpu_memory_utilization", on_cpu, "the workers run on the CPU"),
        ("gpu_memory_utilization", kv_bytes and not on_cpu, "--kv-cache-memory-bytes overrides it"),
        ("kv_cache_memory_bytes", config.num_gpu_blocks_override is not None, "--num-gpu-blocks-override overrides it"),
        ("state_cache_memory_bytes", not limits.num_states, "the model has no recurrent states"),
        ("state_snapshot_interval", not limits.num_states, "the model has no recurrent states"),
        ("enforce_eager", on_cpu, "CUDA graphs need CUDA"),
        ("mm_encoder_tp_mode", alone, "an engine has one worker"),
        ("distributed_backend", alone and (on_cpu or config.engines == 1), "an engine has one worker"),
        ("mm_processor_cache_type", cache.kind == "off", "the cache is off"),
        ("mm_shm_cache_max_object_size_mb", cache.kind != "shm", "no cache in shared memory"),
        ("limit_mm_per_prompt", sizes, "only `count` is used"),
        ("revision", Path(config.model).is_dir(), "MODEL is a directory"),
    ]
    defaults = EngineConfig()
    given = {name for name, _, _ in cases if getattr(config, name) != getattr(defaults, name)}
    return [f"{flag_of(name)} ({reason})" for name, idle, reason in cases if idle and name in given]


def plan_media_cache(config: EngineConfig) -> MediaCachePlan:
    """What becomes of processed media: `--mm-processor-cache-type` and `--mm-processor-cache-gb` on this host. Raises
    ConfigError: the size of the flag exceeds the free memory."""
    if config.mm_processor_cache_gb == 0:
        return MediaCachePlan("off", 0, "--mm-processor-cache-gb 0")
    on_device = config.mm_processor_device == "cuda"
    shared = config.mm_processor_cache_type != "lru" and not on_device
    holders = config.engines * (1 if shared else config.tensor_parallel_size)
    copies = 1 if shared else holders  # each of the size of the flag
    free = available_memory()
    total = int((config.mm_processor_cache_gb or 0) * (1 << 30)) * copies
    if total > free:
        size = f"{config.mm_processor_cache_gb:g} GiB" + ("" if shared else f" for each of {holders} worker(s)")
        raise ConfigError(
            f"--mm-processor-cache-gb: {size} exceed the {free / (1 << 30):.1f} GiB of free memory; "
            "lower it, or omit it to take a quarter of them"
        )
    total = total or min(DEFAULT_MEDIA_CACHE_BYTES * copies, free // 4)
    reason = "the default" if config.mm_processor_cache_type == "auto" else "--mm-processor-cache-type"
    if on_device:
        reason = "--mm-processor-device cuda"
    return MediaCachePlan("shm" if shared else "lru", total // holders, reason)
