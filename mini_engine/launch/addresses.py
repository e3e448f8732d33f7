"""Where the processes of a server find each other, and clients the server."""

from __future__ import annotations

import socket
from pathlib import Path

from mini_engine.config import EngineConfig
from mini_engine.messages import RankAddress


def directory(runtime_dir: Path, generation: int) -> Path:
    """Each generation has its own: names of one that is dead are never found by the next."""
    return runtime_dir / str(generation)


def cores(where: Path, config: EngineConfig) -> list[str]:
    """ZMQ endpoints of the engine cores for API servers."""
    return [f"ipc://{where}/core-{engine}" for engine in range(config.data_parallel_size)]


def core_workers(where: Path, config: EngineConfig) -> list[str]:
    """ZMQ endpoints of the engine cores for their workers."""
    return [f"{endpoint}-workers" for endpoint in cores(where, config)]


def ranks(where: Path, config: EngineConfig) -> list[RankAddress]:
    """Where each worker receives tensors."""
    return [
        RankAddress(engine, rank, f"{where}/tensors-{engine}.{rank}")
        for engine in range(config.data_parallel_size)
        for rank in range(config.tensor_parallel_size)
    ]


def url(config: EngineConfig, listener: socket.socket) -> str:
    """The server's, as clients write it, without the API's version."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds is not None:
        return f"{scheme}+unix://{config.uds}:{config.root_path}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}{config.root_path}"
