"""What a server takes from its host: model files, memory, listening sockets, a runtime directory."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import resource
import shutil
import socket
import ssl
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mini_engine.config import ConfigError, EngineConfig, flag_of
from mini_engine.free_memory import available_memory
from mini_engine.messages import MediaCachePlan
from mini_engine.model.config import ModelConfig
from mini_engine.transport.memory import create_sealed

DEFAULT_MEDIA_CACHE_BYTES = 4 << 30
MAX_UNIX_PATH = 107  # sun_path without its terminating zero


def resolve_model(config: EngineConfig) -> str:
    """The local directory of `config.model`; a hub name is downloaded once, here.

    Raises:
        ConfigError: no such directory and no such model on the hub.
    """
    if Path(config.model).is_dir():
        return str(Path(config.model).resolve())
    if config.model.startswith(("/", ".", "~")):
        raise ConfigError(f"{config.model} is not a directory")
    hub = importlib.import_module("huggingface_hub")
    try:
        return hub.snapshot_download(
            config.model,
            revision=config.revision,
            allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model", "*.py"],
        )
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise ConfigError(
            f"{config.model!r} is neither a directory nor a hub model that can be had here: {error}"
        ) from None


def load_model_config(model_dir: str, config: EngineConfig) -> ModelConfig:
    """The model's own configuration.

    Raises:
        ConfigError: there is none, its architecture is not supported, its heads cannot be shared out as asked, or it
            was made for less than `--max-model-len`.
    """
    try:
        model = ModelConfig.from_dir(model_dir)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the model in {model_dir} cannot be served: {error}") from None
    ranks = config.tensor_parallel_size
    for heads, what in ((model.text.num_heads, "attention"), (model.vision.num_heads, "vision attention")):
        if heads % ranks:
            raise ConfigError(
                f"--tensor-parallel-size: {heads} {what} heads cannot be shared evenly by {ranks} workers; "
                f"choose a size that divides {heads}"
            )
    longest = model.text.max_position_embeddings
    if (config.max_model_len or 0) > longest and not config.allow_long_max_model_len:
        raise ConfigError(
            f"--max-model-len: the model was made for {longest} tokens, not {config.max_model_len}; lower it, "
            "or allow it with --allow-long-max-model-len"
        )
    return model


def without_effect(config: EngineConfig, origins: Mapping[str, str], cache: MediaCachePlan, device: str) -> list[str]:
    """A text for each setting that was asked for and changes nothing on this device, "cpu" or "cuda", or beside others.

    `origins` is, by field, what gave the settings, such as `--port`.
    """
    on_cpu, override = device == "cpu", config.num_gpu_blocks_override is not None
    share, size = config.gpu_memory_utilization, config.kv_cache_memory_bytes
    cases: list[tuple[str, object, bool, str]] = [
        ("gpu_memory_utilization", share, on_cpu, "the workers run on the CPU"),
        ("gpu_memory_utilization", share, not on_cpu and size is not None, "--kv-cache-memory-bytes goes before it"),
        ("kv_cache_memory_bytes", size, override, "--num-gpu-blocks-override goes before it"),
        ("enforce_eager", config.enforce_eager, on_cpu, "CUDA graphs need CUDA"),
        ("mm_processor_cache_type", config.mm_processor_cache_type, cache.kind == "off", "the cache is off"),
        ("mm_shm_cache_max_object_size_mb", config.mm_shm_cache_max_object_size_mb, cache.kind != "shm",
         "no cache in shared memory"),
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


def bind_unix(config: EngineConfig, path: str) -> list[socket.socket]:
    """One bound unix socket for all API-server slots; the supervisor keeps it open.

    A name that a killed server has left behind is taken over.

    Raises:
        ConfigError: the path cannot be had.
    """
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
                probe.connect(path)
                raise ConfigError(f"--uds: another server listens on {path}; choose another")
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"--uds: cannot listen on {path}: {error.strerror or error}") from None
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen()  # at once: the name of one that does not listen looks like a dead server's
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds: cannot listen on {path}: {error.strerror or error}") from None
    return [listener] * config.api_server_count


def bind_listeners(config: EngineConfig) -> list[socket.socket]:
    """One bound SO_REUSEPORT socket per API-server slot, not yet listening; the supervisor keeps them open.

    Raises:
        ConfigError: the address cannot be had. Since SO_REUSEPORT would let two servers of one user share a port
            unnoticed, a plain socket tries the port first.
    """
    if config.uds is not None:
        return bind_unix(config, config.uds)
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            plain.bind(address)
        listeners: list[socket.socket] = []
        for _ in range(config.api_server_count):
            listener = socket.socket(family, kind)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(listeners[0].getsockname() if listeners else address)
            listeners.append(listener)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror}; choose another --host or --port"
        ) from None
    return listeners


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
    holders = config.api_server_count if shared else config.tensor_parallel_size * config.data_parallel_size
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
    if total // holders < 64 << 10:
        raise ConfigError(
            f"--mm-processor-cache-gb: {total} bytes shared by {holders} process(es) keep nothing; raise it, "
            "or turn the cache off with 0"
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


def raise_descriptor_limit() -> None:
    """Allow this process and its children as many open files as the host lets them have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class runtime_directory:  # noqa: N801 - used as a function
    """Context manager: a fresh 0700 directory for this server's sockets, gone again however the server ends.

    A supervisor that is killed cannot clean up, and its children die with it; so a shell waits for the end of a pipe
    whose only writer is the supervisor, and then removes the directory.
    """

    def __enter__(self) -> Path:
        base = tempfile.gettempdir()
        if len(base) + 50 > MAX_UNIX_PATH:
            base = "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix="mini-engine-", dir=base))
        script = 'read -r _; rm -rf -- "$0"'  # one process: `read` is the shell's own
        self.janitor = subprocess.Popen(
            ["/bin/sh", "-c", script, str(self.path)], stdin=subprocess.PIPE, start_new_session=True
        )
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        assert self.janitor.stdin is not None
        self.janitor.stdin.close()
        self.janitor.wait()
