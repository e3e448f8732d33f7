"""The file server of `--media-transport http`."""

from __future__ import annotations

import contextlib
import http.server
import socket

from mini_engine.bench.serving.media import Server


def test_many_connect_at_once():
    """Before any of them is accepted, and without the second that a dropped connection waits before it tries again."""
    with Server(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server, contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=0.9))
