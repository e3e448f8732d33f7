"""How media travel: inside the request, as files that the server reads, or from a file server on this host.

Both ends of the file server are here: it is a process of its own, so that it takes no time from the client's loop, and
it ends with the benchmark. The folder of files is made here, and gone however the benchmark ends.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import mimetypes
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from mini_engine.bench.datasets.sample import Medium
from mini_engine.bench.report import BenchError
from mini_engine.confinement import die_with_parent
from mini_engine.host import runtime_directory

MediaTransport = Literal["data", "file", "http"]
HOST = "127.0.0.1"


class MediaPlace:
    """Gives each medium its URL. With files, they lie below `folder`, which lies in `allowed`, the folder that the
    server may read; with `base`, they are fetched from there.
    """

    def __init__(self, folder: Path | None = None, base: str | None = None, allowed: Path | None = None):
        self._folder = folder
        self._base = base
        self._urls: dict[int, str] = {}  # by the identity of a medium, which the samples keep
        self.server_flags: list[str] = []
        if base is not None:
            self.server_flags = ["--allowed-media-domains", base.removeprefix("http://")]
        elif folder is not None:
            self.server_flags = ["--allowed-local-media-path", str(allowed or folder)]

    def add(self, media: Iterable[Medium]) -> None:
        """Write the media where the server finds them.

        Raises:
            BenchError: they cannot be written.
        """
        for medium in media:
            if self._folder is not None and id(medium) not in self._urls:
                name = f"{len(self._urls)}{mimetypes.guess_extension(medium.mime) or ''}"
                try:
                    (self._folder / name).write_bytes(medium.data)
                except OSError as error:
                    raise BenchError(
                        f"no room for the media in {self._folder.parent} ({error.strerror}): give --media-dir another"
                    ) from None
                self._urls[id(medium)] = f"{self._base}/{name}" if self._base else (self._folder / name).as_uri()

    def url(self, medium: Medium) -> str:
        """The URL that stands for a medium in a request; by file or HTTP it must have been added."""
        if self._folder is None:
            return f"data:{medium.mime};base64,{base64.b64encode(medium.data).decode()}"
        return self._urls[id(medium)]


@contextlib.contextmanager
def media_place(transport: MediaTransport, folder: Path | None, port: int) -> Iterator[MediaPlace]:
    """A place for media, gone when the block ends. Files lie in a new folder in `folder`; by HTTP they are served at
    `port`, 0 for a free one.

    Raises:
        BenchError: the file server did not start.
    """
    if transport == "data":
        yield MediaPlace()
        return
    with runtime_directory(folder) as made:
        files = made.resolve()
        files.chmod(0o755)  # the server may be another user's
        if transport == "file":
            yield MediaPlace(files, allowed=folder and folder.resolve())
            return
        with file_server(files, port) as base:
            yield MediaPlace(files, base)


@contextlib.contextmanager
def file_server(folder: Path, port: int) -> Iterator[str]:
    """Serves the files of `folder` on the loopback interface; gives the URL of its root, without a slash at the end.

    Raises:
        BenchError: it did not start.
    """
    command = [sys.executable, "-m", "mini_engine.bench.serving.media", str(os.getpid()), str(folder), str(port)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            taken = server.stdout.readline().strip()
            if not taken:
                raise BenchError(f"--media-port: the file server cannot listen on port {port}: choose another one")
            yield f"http://{HOST}:{int(taken)}"
        finally:
            server.kill()


class Server(http.server.ThreadingHTTPServer):
    """Takes as many connections at once as the downloads of some API servers open."""

    request_queue_size = 1024  # by default 5: one more waits a second until its first packet is sent again

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keeps silent about who hangs up in the middle of a file, as a server does whose client has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Files(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Keeps silent about the requests."""


def main() -> int:
    """The file server's end: `PID FOLDER PORT`; prints the port that it took."""
    parent, folder, port = sys.argv[1:]
    die_with_parent(int(parent))
    handler = functools.partial(_Files, directory=folder)
    try:
        server = Server((HOST, int(port)), handler)
    except OSError:
        return 1
    print(server.server_port, flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
