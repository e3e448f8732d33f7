"""HTTP servers of the fetch tests, on loopback: they send just what a test says, byte for byte."""

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

Answer = Callable[[socket.socket, str], None]
"""Called with the connection and the request's head. Ending it closes the connection."""


class WebServer:
    """Listens on a free port of 127.0.0.1 while its `with` block runs."""

    def __init__(self, answer: Answer | bytes, tls: ssl.SSLContext | None = None):
        self.requests: list[str] = []
        self.dialled = 0
        self._answer = (lambda connection, _: connection.sendall(answer)) if isinstance(answer, bytes) else answer
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> "WebServer":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.dialled += 1
                thread = threading.Thread(target=self._serve, args=(connection,))
                thread.start()
                self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:  # the other side may leave at any time
            connection.settimeout(60)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    received = connection.recv(65536)
                    if not received:
                        return
                    head += received
                self.requests.append(head.decode())
                self._answer(connection, self.requests[-1])


def response(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """A whole answer. `headers` have _ for -; a Content-Length is added unless one is given or Transfer-Encoding is."""
    if not {"Content_Length", "Transfer_Encoding"} & headers.keys():
        headers["Content_Length"] = str(len(body))
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*chunks: bytes) -> bytes:
    """A body in HTTP's chunks, with its end."""
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
