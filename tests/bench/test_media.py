"""The file server of `--media-transport http`."""

from __future__ import annotations

import contextlib
import http.server
import socket
import struct
import time
from pathlib import Path

import pytest

from mini_engine.bench.serving.media import Server, file_server


def test_many_connect_at_once():
    """Before any of them is accepted, and without the second that a dropped connection waits before it tries again."""
    with Server(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server, contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=0.9))


def test_who_hangs_up_is_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "long").write_bytes(bytes(50_000_000))
    with file_server(tmp_path, 0) as base:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2]))) as leaving:
                leaving.sendall(b"GET /long HTTP/1.1\r\nhost: here\r\n\r\n")
                assert leaving.recv(1000)
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.3)  # for what the server would say
    assert capfd.readouterr().err == ""
