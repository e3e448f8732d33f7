"""A host that is short of something is not taken for a bad URL or a bad file."""

import errno
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import pytest
from PIL import Image

from mini_engine.media import http_fetch, shortage
from mini_engine.media.errors import MediaError
from mini_engine.media.fetch import MediaPolicy, declared_size, fetch
from mini_engine.media.image import decode_image
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.shortage import Shortage, check_host, shortage_in
from mini_engine.media.video import decode_video
from tests.media.fetching import refusal
from tests.media.web import WebServer, response
from tests.shortages import no_descriptors, no_threads

URL = "http://media.test:9"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.EMFILE, "x"), "open files"),
        (OSError(errno.ENFILE, "x"), "open files"),
        (OSError(errno.ENOMEM, "x"), "memory"),
        (OSError(errno.ENOBUFS, "x"), "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("can't start new thread"), "threads"),
        (Shortage("threads"), "threads"),
        (FileNotFoundError(errno.ENOENT, "x"), None),
        (socket.gaierror(socket.EAI_NONAME, "x"), None),
        (OSError("without a number"), None),
        (RuntimeError("x"), None),
        (MediaError("video 1", "x"), None),
    ],
    ids=str,
)
def test_what_an_error_says(error: Exception, what: str | None) -> None:
    found = shortage_in(error)
    assert (found and found.what) == what


def test_a_host_with_all_of_it_is_short_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_host()
    with no_descriptors(), pytest.raises(Shortage, match="open files"):
        check_host()
    monkeypatch.setattr(shortage, "_TRIED_BYTES", 1 << 60)
    with pytest.raises(Shortage, match="memory"):
        check_host()


@pytest.mark.parametrize("ask", [fetch, declared_size])
def test_a_file_that_cannot_be_opened_for_want_of_a_descriptor(ask: Callable, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"clip")
    policy = MediaPolicy(tmp_path, 1000)
    with no_descriptors():
        with pytest.raises(Shortage, match="open files") as caught:
            ask(f"file://{tmp_path}/clip.mp4", policy)
        assert str(tmp_path) not in str(caught.value)
        with pytest.raises(MediaError):  # the client's fault, now as ever
            ask(f"file://{tmp_path}/missing.mp4", policy)
    assert fetch(f"file://{tmp_path}/clip.mp4", policy) == b"clip"


def test_a_web_server_that_is_not_dialled_for_want_of_a_descriptor(policy: MediaPolicy) -> None:
    with no_descriptors(), pytest.raises(Shortage, match="open files"):
        fetch(URL, policy)
    with WebServer(response(b"clip")) as server:
        assert fetch(f"http://media.test:{server.port}", policy) == b"clip"


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_one_that_is_not_dialled_for_want_of_memory(
    number: int, policy: MediaPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Socket(socket.socket):
        def connect(self, _: object) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(Shortage, match="memory"):
        fetch(URL, policy)


def test_a_name_that_the_resolver_had_no_descriptor_for(policy: MediaPolicy) -> None:
    """It says that there is no such name, as the C library's does."""
    policy = replace(policy, allowed_media_domains=["unknown.test"])
    with no_descriptors(), pytest.raises(Shortage, match="open files"):
        fetch("http://unknown.test", policy)
    assert "cannot be resolved" in refusal("http://unknown.test", policy)


def test_a_name_that_there_is_no_thread_for(policy: MediaPolicy) -> None:
    with no_threads(), pytest.raises(RuntimeError) as caught:
        fetch(URL, policy)
    found = shortage_in(caught.value)
    assert found is not None and found.what == "threads"


def test_a_certificate_that_there_was_no_descriptor_for(policy: MediaPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        def wrap_socket(self, *_: object, **__: object) -> None:
            raise ssl.SSLCertVerificationError("unable to get local issuer certificate")

    monkeypatch.setattr(http_fetch, "tls_context", Context)
    with WebServer(b"") as server:
        url = f"https://media.test:{server.port}"
        assert "no TLS connection" in refusal(url, policy)
        monkeypatch.setattr(http_fetch, "check_host", no_file)
        with pytest.raises(Shortage):
            fetch(url, policy)


def no_file() -> None:
    raise Shortage("open files")


def test_pillow_that_cannot_import_a_format_for_want_of_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_plugin(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Image, "open", open_plugin)
    with pytest.raises(Shortage, match="open files"):
        decode_image(b"a file")


@pytest.mark.parametrize("short", [False, True])
def test_ffmpeg_that_wants_for_memory(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so of a file that claims too much as well: that one is the client's."""

    def give_nothing(*_: object, **__: object) -> None:
        raise av.error.MemoryError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(av, "open", give_nothing)
    if short:
        monkeypatch.setattr(shortage, "_TRIED_BYTES", 1 << 60)
    with pytest.raises(Shortage if short else MediaError):
        decode_video(b"a file", VideoSampling(num_frames=2))
