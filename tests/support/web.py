"""A web server on loopback for the tests of downloads. It sends exactly the bytes that a test gives."""

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

Answer = Callable[[socket.socket, str], None]
"""Called with the connection and the request's head; a body is still to be received. The connection is closed when it
returns."""


class WebServer:
    """Listens on a free port of 127.0.0.1 inside its `with` block. `dialled` counts connections."""

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
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:  # the client may disconnect at any time
            connection.settimeout(60)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += (received := connection.recv(1))
                    if not received:
                        return
                self.requests.append(head.decode())
                self._answer(connection, head.decode())


def response(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """A whole response. `headers` have _ for -. Adds Content-Length, unless it or Transfer-Encoding is given."""
    if not {"Content_Length", "Transfer_Encoding"} & headers.keys():
        headers["Content_Length"] = str(len(body))
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*chunks: bytes) -> bytes:
    """A body in chunked transfer coding, with its end."""
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def make_certificate(folder: Path, names: str) -> tuple[Path, Path]:
    """A self-signed certificate for `names`, such as `DNS:localhost,IP:127.0.0.1`, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=test -addext "
    make += f"subjectAltName={names} -addext keyUsage=critical,digitalSignature,keyCertSign"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key
