"""What a server takes from its host: model files, memory, descriptors, a runtime directory."""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mini_engine.config import ConfigError, EngineConfig, flag_of
from mini_engine.free_memory import available_memory
from mini_engine.messages import MediaCachePlan
from mini_engine.model.checkpoint import CheckpointError, find_tensors
from mini_engine.model.config import ModelConfig
from mini_engine.model.registry import UnknownArchitecture, find_spec
from mini_engine.transport.memory import create_sealed

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# All that hold a JSON object, where they are there; the libraries that read them do not say which one is damaged.
JSON_FILES = (
    *TOKENIZER_FILES, *PROCESSOR_FILES, "video_preprocessor_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "generation_config.json",
)  # fmt: skip
DEFAULT_MEDIA_CACHE_BYTES = 4 << 30
SMALLEST_MEDIA_CACHE = 256 << 10  # bytes of one holder; a store's probe alone takes 98 KiB
SPARE_DESCRIPTORS = 128  # for what is open in each process however many there are, and some clients
MAX_UNIX_PATH = 107  # sun_path without its terminating zero


def resolve_model(config: EngineConfig) -> str:
    """The local directory of `config.model`; a hub name is downloaded once, here, or taken from the hub's cache.

    Raises:
        ConfigError: no such directory and no such model on the hub; or, with HF_HUB_OFFLINE, in its cache.
    """
    if Path(config.model).is_dir():
        return str(Path(config.model).resolve())
    if config.model.startswith(("/", ".", "~")):
        raise ConfigError(f"{config.model} is not a directory")
    weights = [] if config.load_format == "dummy" else ["*.safetensors"]
    logger.info(
        "%s is no directory here: taking it from the hub, or from the hub's cache; then it is loaded", config.model
    )
    hub = importlib.import_module("huggingface_hub")
    try:
        return hub.snapshot_download(
            config.model,
            revision=config.revision,
            allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.py", *weights],
        )
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        if hub.constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"{config.model!r} is no directory, and not in the hub's cache, {hub.constants.HF_HUB_CACHE}; "
                "unset HF_HUB_OFFLINE to download it, or set HF_HOME to where it is"
            ) from None
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{config.model!r} is neither a directory nor a hub model that can be had here: {why}"
        ) from None


def load_model_config(model_dir: str, config: EngineConfig) -> ModelConfig:
    """The model's own configuration.

    Raises:
        ConfigError: there is none, its architecture is not supported, its heads cannot be shared out as asked, or it
            was made for less than `--max-model-len`.
    """
    if not (Path(model_dir) / "config.json").is_file():
        raise ConfigError(
            f"{model_dir} has no config.json; give the directory that holds a Hugging Face model's files, or copy them "
            "from where the model is from"
        )
    try:
        model = ModelConfig.from_dir(model_dir)
    except (OSError, ValueError, RecursionError) as error:
        other = isinstance(error, UnknownArchitecture)
        remedy = "" if other else "; mend its config.json, or copy it from where the model is from"
        raise ConfigError(f"the model in {model_dir} cannot be served: {error}{remedy}") from None
    ranks, kv_heads = config.tensor_parallel_size, model.text.num_kv_heads
    if model.text.num_heads % ranks:
        raise ConfigError(
            f"--tensor-parallel-size: {model.text.num_heads} attention heads cannot be shared evenly by {ranks} "
            f"workers; choose a size that divides {model.text.num_heads}"
        )
    if model.vision.num_heads % ranks and config.mm_encoder_tp_mode == "weights":
        raise ConfigError(
            f"--tensor-parallel-size: {model.vision.num_heads} vision attention heads cannot be shared evenly by "
            f"{ranks} workers; choose a size that divides {model.vision.num_heads}, or --mm-encoder-tp-mode data"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"--tensor-parallel-size: {kv_heads} key-value heads can be neither split nor repeated evenly over {ranks} "
            f"workers; choose a divisor or a multiple of {kv_heads}"
        )
    longest = model.text.max_position_embeddings
    if (config.max_model_len or 0) > longest and not config.allow_long_max_model_len:
        raise ConfigError(
            f"--max-model-len: the model was made for {longest} tokens, not {config.max_model_len}; lower it, "
            "or allow it with --allow-long-max-model-len"
        )
    return model


def check_model_files(model_dir: str, model: ModelConfig, config: EngineConfig) -> None:
    """Look for all that the model's processes will read, and at the headers of the weights; whether those fit the model
    is found when it is built.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    for what, names in (("tokenizer", TOKENIZER_FILES), ("processor", PROCESSOR_FILES)):
        if not any((Path(model_dir) / name).is_file() for name in names):
            raise ConfigError(
                f"{model_dir} has no {what}: neither {' nor '.join(names)}; copy them from where the model is from"
            )
    for path in (Path(model_dir) / name for name in JSON_FILES):
        if path.exists():
            _check_json(path)
    if config.load_format == "dummy":
        return
    try:
        find_tensors(Path(model_dir), find_spec([model.architecture]).canonical_name)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _check_json(path: Path) -> None:
    """Raises ConfigError unless the file holds a JSON object: libraries would say what is wrong, but not where."""
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")
        if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            raise ValueError("it holds something else")
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path} is not a JSON object that can be read: {why}; copy it from where the model is from"
        ) from None


def without_effect(config: EngineConfig, origins: Mapping[str, str], cache: MediaCachePlan, device: str) -> list[str]:
    """A text for each setting that was asked for and changes nothing on this device, "cpu" or "cuda", or beside others.

    `origins` is, by field, what gave the settings, such as `--port`.
    """
    on_cpu, override = device == "cpu", config.num_gpu_blocks_override is not None
    alone = config.tensor_parallel_size == 1
    share, size = config.gpu_memory_utilization, config.kv_cache_memory_bytes
    cases: list[tuple[str, object, bool, str]] = [
        ("gpu_memory_utilization", share, on_cpu, "the workers run on the CPU"),
        ("gpu_memory_utilization", share, not on_cpu and size is not None, "--kv-cache-memory-bytes goes before it"),
        ("kv_cache_memory_bytes", size, override, "--num-gpu-blocks-override goes before it"),
        ("enforce_eager", config.enforce_eager, on_cpu, "CUDA graphs need CUDA"),
        ("mm_encoder_tp_mode", config.mm_encoder_tp_mode, alone, "an engine has one worker"),
        ("distributed_backend", config.distributed_backend, alone and (on_cpu or config.data_parallel_size == 1),
         "an engine has one worker"),
        ("mm_processor_cache_type", config.mm_processor_cache_type, cache.kind == "off", "the cache is off"),
        ("mm_shm_cache_max_object_size_mb", config.mm_shm_cache_max_object_size_mb, cache.kind != "shm",
         "no cache in shared memory"),
        ("limit_mm_per_prompt", config.limit_mm_per_prompt,
         any(isinstance(one, dict) and one.keys() - {"count"} for one in config.limit_mm_per_prompt.values()),
         "sizes beside a count change nothing"),
        ("revision", config.revision, Path(config.model).is_dir(), "MODEL is a directory"),
    ]  # fmt: skip
    defaults = EngineConfig()
    return [
        f"{origin if origin.startswith('-') else flag_of(name)} ({reason})"
        for name, value, idle, reason in cases
        for origin in [origins.get(name, "")]
        if idle and (origin.startswith("-") or value != getattr(defaults, name))
    ]


def check_tls(config: EngineConfig) -> None:
    """Read the files of `--ssl-keyfile` and the like, as each API server will.

    Raises:
        ConfigError: they are no key and its certificate.
    """
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:
        raise ConfigError(
            f"--ssl-keyfile, --ssl-certfile, --ssl-ca-certs: {error.strerror or error}; give PEM files that go together"
        ) from None


def plan_media_cache(config: EngineConfig) -> MediaCachePlan:
    """What becomes of processed media: `--mm-processor-cache-type` and `--mm-processor-cache-gb` on this host.

    Raises:
        ConfigError: more memory is asked for than is free, or a kind of memory that this host does not allow.
    """
    if config.mm_processor_cache_gb == 0:
        return MediaCachePlan("off", 0, "asked for by --mm-processor-cache-gb 0")
    on_device = config.mm_processor_device == "cuda"
    wanted = "lru" if on_device else config.mm_processor_cache_type
    refusal = _shared_memory_refusal() if wanted != "lru" else None
    if wanted == "shm" and refusal is not None:
        raise ConfigError(
            f"--mm-processor-cache-type shm: this host gives no shared memory ({refusal}); "
            "use --mm-processor-cache-type lru"
        )
    shared = wanted != "lru" and refusal is None
    holders = config.data_parallel_size * (1 if shared else config.tensor_parallel_size)
    free = available_memory()
    if config.mm_processor_cache_gb is None:
        total = min(DEFAULT_MEDIA_CACHE_BYTES * (1 if shared else holders), free // 4)
    else:
        total = int(config.mm_processor_cache_gb * (1 << 30)) * (1 if shared else holders)
    if total > free:
        each = "" if shared else f" for each of {holders} worker(s)"
        raise ConfigError(
            f"--mm-processor-cache-gb: {config.mm_processor_cache_gb:g} GiB{each} cannot be had, "
            f"{free / (1 << 30):.1f} GiB of memory are free; lower it, or leave it out to take a quarter of them"
        )
    if total // holders < SMALLEST_MEDIA_CACHE:
        raise ConfigError(
            f"--mm-processor-cache-gb: {total} bytes shared by {holders} process(es) are too few, each needs "
            f"{SMALLEST_MEDIA_CACHE}; raise it, or turn the cache off with 0"
        )
    reason = "asked for by --mm-processor-cache-type"
    if on_device:
        reason = "patches made on CUDA are kept there"
    if wanted == "auto":
        reason = "the host shares memory" if shared else f"the host gives no shared memory: {refusal}"
    return MediaCachePlan("shm" if shared else "lru", total // holders, reason)


def _shared_memory_refusal() -> str | None:
    """Why sealed memory cannot be made and handed over here; None if it can."""
    try:
        fd = create_sealed(mmap.PAGESIZE)
        try:
            here, there = socket.socketpair(socket.AF_UNIX)
            with here, there:
                socket.send_fds(here, [b"?"], [fd])
                _, received, _, _ = socket.recv_fds(there, 1, 1)
            for each in received:
                os.close(each)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return None if received else "descriptors cannot be handed over"


def fill_standard_descriptors() -> None:
    """Open what this process was started without of stdin, stdout and stderr: another file in their place would be
    written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def raise_descriptor_limit(config: EngineConfig) -> None:
    """Allow this process and its children as many open files as the host lets them have.

    Raises:
        ConfigError: these are too few to start with.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ranks = config.data_parallel_size * config.tensor_parallel_size
    # The supervisor has up to four for a child; an API server connects to every rank, and a rank to every API server.
    # It also has up to three for each of its media decoders.
    needed = SPARE_DESCRIPTORS + 4 * (config.api_server_count + config.data_parallel_size + ranks)
    needed += 3 * (2 * (len(os.sched_getaffinity(0)) // config.api_server_count) + 1)
    if hard < needed:
        raise ConfigError(
            f"a process may have {hard} open files here, and this server needs {needed} to start: raise the limit "
            "(ulimit -n, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container), or start fewer processes"
        )


class runtime_directory:  # noqa: N801 - used as a function
    """Context manager: a fresh 0700 directory for this process, gone again however the process ends.

    It lies in `parent`; by default where temporary files do, if the paths of sockets are short enough there.

    A supervisor that is killed cannot clean up, and its children die with it; so a shell waits for the end of a pipe
    whose only writer is the supervisor, and then removes the directory. A service manager that asks all processes to
    end at once does not move it.

    Raises:
        ConfigError: there is no room for one, or no shell.
    """

    def __init__(self, parent: Path | None = None):
        self.parent = parent

    def __enter__(self) -> Path:
        base = self.parent or Path(os.environ.get("TMPDIR", "/tmp"))
        try:
            if self.parent is None:
                base = Path(tempfile.gettempdir())  # which takes another where TMPDIR cannot be written to
                if (named := os.environ.get("TMPDIR")) and base != Path(named).absolute():
                    raise ConfigError(f"TMPDIR is {named}, where nothing can be written: set it to where that works")
                if len(str(base)) + 50 > MAX_UNIX_PATH:
                    base = Path("/tmp")
            self.path = Path(tempfile.mkdtemp(prefix="mini-engine-", dir=base))
        except OSError as error:
            raise ConfigError(
                f"no room for a directory in {base} ({error.strerror}): set TMPDIR to where there is"
            ) from None
        script = 'trap "" TERM INT HUP; read -r _; rm -rf -- "$0"'  # one process: `read` is the shell's own
        try:
            self.janitor = subprocess.Popen(
                ["/bin/sh", "-c", script, str(self.path)], stdin=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            self.path.rmdir()
            raise ConfigError(
                f"/bin/sh cannot be started, to remove {self.path} in the end: {error.strerror}"
            ) from None
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        assert self.janitor.stdin is not None
        self.janitor.stdin.close()
        self.janitor.send_signal(signal.SIGCONT)  # one that was stopped would be waited for in vain
        self.janitor.wait()
