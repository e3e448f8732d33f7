"""The sockets that API servers listen at, bound by the supervisor, so that they outlive each API server."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mini_engine.config import ConfigError, EngineConfig


def bind_listeners(config: EngineConfig) -> list[socket.socket]:
    """One bound SO_REUSEPORT socket per API server, not yet listening; the supervisor keeps them open. Raises
    ConfigError: the address cannot be bound. Of a name with both kinds of addresses it is the IPv4 one.

    Since SO_REUSEPORT would let two servers of one user share a port unnoticed, a plain socket tries the port first.
    """
    if config.uds is not None:
        return _bind_unix(config, config.uds)
    try:
        stream, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
        infos = socket.getaddrinfo(config.host, config.port, type=stream, flags=passive)
        family, kind, _, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)  # IPv4 first
        with socket.socket(family, kind) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            plain.bind(address)
        with _bind(family, address) as first:  # port 0 is some port from here on
            # All by number: a socket that shuts down, to leave those that share the port, would lose one chosen for it.
            return [_bind(family, first.getsockname()) for _ in range(config.api_server_count)]
    except (OSError, UnicodeError) as error:  # the latter: a label of the name is empty or too long (RFC 1035)
        host, reason = f"{config.host} port {config.port}", getattr(error, "strerror", "no valid host name")
        raise ConfigError(f"cannot listen on {host}: {reason}; choose another --host or --port") from None


def _bind_unix(config: EngineConfig, path: str) -> list[socket.socket]:
    """One bound unix socket for all API servers; the supervisor keeps it open. The name that a killed server has
    left behind is used again. Raises ConfigError: the path cannot be bound."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"--uds: another server listens on {path}; choose another")
            os.unlink(path)
        listener.bind(path)
        listener.listen()  # at once: the name of one that does not listen looks like a dead server's
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds: cannot listen on {path}: {error.strerror or error}") from None
    return [listener] * config.api_server_count


@contextlib.contextmanager
def removed_afterwards(path: str) -> Iterator[None]:
    """Remove the name of a bound unix socket at the end, unless another socket has been bound there since."""
    inode = os.stat(path).st_ino
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)


def _bind(family: int, address: Any) -> socket.socket:
    """Bound without SO_REUSEADDR, where that can be: the kernel lets sockets that have it share a port as long as none
    listens, and so would take another start's plain one. An API server sets it when it listens."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
    except OSError:  # connections of another program are closing there
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    return listener


def leave_port(listener: socket.socket) -> None:
    """Have the kernel queue no more connections at a TCP listener; those that are queued are reset.

    The socket leaves the SO_REUSEPORT group, in every process that has it open, and joins again when a replacement
    listens on it. It must be bound to a port by number: a port that the kernel chose would be released. A socket that
    does not listen is not shut down: connections that it accepted later would be shut down, too.
    """
    if listener.family != socket.AF_UNIX and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.shutdown(socket.SHUT_RDWR)


def url_of(config: EngineConfig, listener: socket.socket) -> str:
    """The server's, as clients write it, without the API's version."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds is not None:
        return f"{scheme}+unix://{config.uds}:{config.root_path}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}{config.root_path}"
