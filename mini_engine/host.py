"""What a server takes from its host: model files, listening sockets, a runtime directory."""

from __future__ import annotations

import importlib
import resource
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.model.config import ModelConfig

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
        ConfigError: there is none, its architecture is not supported, or its heads cannot be shared out as asked.
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
    return model


def bind_listeners(config: EngineConfig) -> list[socket.socket]:
    """One bound SO_REUSEPORT socket per API-server slot, not yet listening; the supervisor keeps them open.

    Raises:
        ConfigError: the address cannot be had. Since SO_REUSEPORT would let two servers of one user share a port
            unnoticed, a plain socket tries the port first.
    """
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
