"""Requests to an API server of the test's choice.

The kernel spreads connections over the servers' sockets. Which of them has accepted one is seen from outside: the
connection's other end is a socket in /proc/net/tcp, whose inode is among the descriptors of one process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.e2e.asked import Asked
from tests.e2e.barriers import eventually
from tests.e2e.running_server import START_SECONDS, RunningServer, figures, message


def connect(server: RunningServer, title: str, seconds: float = START_SECONDS) -> http.client.HTTPConnection:
    """A connection that the process with this title has accepted."""
    address = urlsplit(server.url)
    deadline = time.monotonic() + seconds
    patience = 0.25  # a busy server takes longer; in the line of one that has just died nobody accepts
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
        try:
            connection.connect()
        except (ConnectionRefusedError, ConnectionResetError):  # nobody listens now, or any more
            time.sleep(0.05)
            continue
        inode = accepted_as(connection.sock, patience)
        if inode and has_socket(server.pids().get(title), inode):
            return connection
        connection.close()
        patience = patience if inode else min(2 * patience, 2)
    raise AssertionError(f"{title} accepts no connections\n{server.log}")


def accepted_as(ours: socket.socket, seconds: float) -> int | None:
    """The inode of the connection's other end; None when it was not accepted in time."""
    ends = ours.getpeername()[1], ours.getsockname()[1]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for local, remote, inode in tcp_sockets():
            if (local, remote) == ends and inode:
                return inode
        time.sleep(0.005)
    return None


def tcp_sockets() -> Iterator[tuple[int, int, int]]:
    """Local port, remote port, and the inode once a process has it, of each TCP socket."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        yield int(fields[1][-4:], 16), int(fields[2][-4:], 16), int(fields[9])


def wait_for_no_clients(server: RunningServer) -> None:
    """Until the API servers have closed every connection."""

    def check() -> None:
        ours = [inode for local, remote, inode in tcp_sockets() if local == urlsplit(server.url).port and remote]
        assert not any(ours), "an API server has a connection"

    eventually(check)


def has_socket(pid: int | None, inode: int) -> bool:
    """Whether the process has this socket open."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(fd) == f"socket:[{inode}]":
                    return True
    return False


def call(server: RunningServer, title: str, method: str, path: str) -> str:
    """The body of a response of this API server, which has to be a 200."""
    with contextlib.closing(connect(server, title)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read().decode()
        assert response.status == 200, body
        return body


def catch_up(server: RunningServer, *titles: str) -> None:
    """Until each of these API servers has read all that the engines have told it up to now, such as which media they
    keep: for `/metrics` it asks the engines, and their answer comes last."""
    for title in titles:
        figures(lambda title=title: call(server, title, "GET", "/metrics"))


class Asking:
    """A question that is on its way to one API server."""

    def __init__(self, server: RunningServer, title: str, one: Asked, **more: object):
        self._connection = connect(server, title)
        self._socket = self._connection.sock
        self._response: http.client.HTTPResponse | None = None
        parts = message(one.text, one.urls)
        body = {"model": server.model, "messages": [parts], "temperature": 0, **more}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})

    def reply(self) -> dict:
        """The whole response, which has to be a 200."""
        response = self._connection.getresponse()
        body = json.loads(response.read())
        self._connection.close()
        assert response.status == 200, body
        return body

    def answer(self) -> str:
        """The answer's text."""
        return self.reply()["choices"][0]["message"]["content"]

    def response(self) -> http.client.HTTPResponse:
        """Of which the events that were waited for are read."""
        self._response = self._response or self._connection.getresponse()
        return self._response

    def read_events(self, count: int) -> None:
        """Wait for that many events of a stream that is not at its end."""
        while count:
            line = self.response().readline()
            assert line and b"[DONE]" not in line, "the stream has ended"
            count -= line.startswith(b"data: ")

    def has_nothing_yet(self) -> bool:
        """Whether not a byte has come."""
        return not select.select([self._connection.sock], [], [], 0)[0]

    def disconnect(self) -> None:
        """End the connection for a thread that reads from it, before it is closed."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Close the connection, whatever has come by now. Without effect when closed."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def is_cut(self) -> bool:
        """Whether the connection ends without the end of the answer."""
        try:
            if self._response is None:
                self._connection.getresponse()
                return False
            return b"[DONE]" not in self._response.read()
        except (ConnectionError, http.client.HTTPException):
            return True
        finally:
            self.hang_up()


def hang_up(server: RunningServer, one: Asked, seconds: float) -> None:
    """Send a streaming request and close the connection after `seconds`, whatever has come by then."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
    body = {"model": server.model, "messages": [message(one.text, one.urls)], "stream": True, "max_tokens": 500}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(seconds)
    connection.close()
