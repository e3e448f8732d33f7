"""The port of a server that does not listen yet, of one that does, and of one that has ended."""

import contextlib
import socket
from pathlib import Path

import pytest

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.launch.listeners import bind_listeners, leave_port


def bound(stack: contextlib.ExitStack, port: int = 0, count: int = 2, host: str = "127.0.0.1") -> list[socket.socket]:
    listeners = bind_listeners(EngineConfig(host=host, port=port, api_server_count=count))
    return [stack.enter_context(listener) for listener in listeners]


def listen(listener: socket.socket) -> None:
    """As an API server does."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.listen()


@pytest.mark.parametrize("listening", [0, 1, 2])
def test_a_second_server_is_refused_whether_the_first_listens_or_only_loads(listening):
    with contextlib.ExitStack() as stack:
        first = bound(stack)
        for listener in first[:listening]:
            listen(listener)
        with pytest.raises(ConfigError, match="Address already in use; choose another"):
            bound(stack, first[0].getsockname()[1])


def test_a_unix_socket_takes_the_place_of_nothing_else(tmp_path):
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "file", tmp_path / "nowhere" / "socket"):
        with pytest.raises(ConfigError, match="^--uds: cannot listen on"):
            bind_listeners(EngineConfig(uds=str(path)))
    assert (tmp_path / "file").read_text() == "precious"


def test_the_unspecified_ipv6_address_serves_both_families():
    addresses = Path("/proc/net/if_inet6")
    if not (addresses.exists() and addresses.read_text()):
        pytest.skip("needs IPv6")
    with contextlib.ExitStack() as stack:
        (listener,) = bound(stack, count=1, host="::")
        listen(listener)
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, listener.getsockname()[1])).close()


def test_a_name_with_addresses_of_both_families_is_the_ipv4_one(monkeypatch):
    both = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    infos = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in both]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
    with contextlib.ExitStack() as stack:
        assert {listener.getsockname()[0] for listener in bound(stack, host="localhost")} == {"127.0.0.1"}


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "\udcff", "[::1]", ""])
def test_a_host_that_is_no_name_is_refused(host):
    with pytest.raises(ConfigError, match=r"^cannot listen on .* port 0: \S.*; choose another --host or --port"):
        bind_listeners(EngineConfig(host=host, port=0))


@pytest.mark.parametrize("of_another_program", [False, True])
def test_a_port_is_free_again_at_once(of_another_program):
    with contextlib.ExitStack() as stack:
        if of_another_program:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # with SO_REUSEADDR alone
        else:
            (first,) = bound(stack, count=1)
            listen(first)
        port = first.getsockname()[1]
        # A connection that this end has closed first: the kernel keeps it for a minute.
        with socket.create_connection(first.getsockname()) as client:
            first.accept()[0].close()
            assert client.recv(1) == b""
    with contextlib.ExitStack() as stack:
        for listener in bound(stack, port):
            listen(listener)


def test_a_port_that_is_left_resets_its_queue_and_is_joined_again():
    """Left several times: as when the successor of a dead API server dies while it loads."""
    with contextlib.ExitStack() as stack:
        (listener,) = bound(stack, count=1)
        for _ in range(2):
            listen(listener)
            with socket.create_connection(listener.getsockname()) as client:
                leave_port(listener)
                leave_port(listener)
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(listener.getsockname())
        listen(listener)
        with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
            client.sendall(b"?")
            assert server.recv(1) == b"?"
