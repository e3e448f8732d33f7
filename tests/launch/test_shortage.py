"""A host that is out of file descriptors, memory or threads is a Shortage, not the error of a bad URL."""

import errno
import socket

import pytest

from mini_engine.launch.shortage import Shortage, shortage_in
from mini_engine.media.media_errors import MediaError
from mini_engine.media.sources.http_fetch import fetch_http
from mini_engine.media.sources.policy import MediaPolicy
from tests.support.shortages import no_descriptors


def test_errors_of_the_host_are_told_from_others() -> None:
    torch_text = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"
    for error, resource in (
        (OSError(errno.EMFILE, "x"), "file descriptors"),
        (OSError(errno.ENOMEM, "x"), "memory"),
        (OSError(errno.EAGAIN, "x"), "threads"),
        (MemoryError(), "memory"),
        (RuntimeError(torch_text), "memory"),
        (RuntimeError("can't start new thread"), "threads"),
        (FileNotFoundError(errno.ENOENT, "x"), None),
        (socket.gaierror(socket.EAI_NONAME, "x"), None),
        (MediaError("video 1", "x"), None),
    ):
        shortage = shortage_in(error)
        assert (shortage and shortage.what) == resource, repr(error)


async def test_a_download_without_descriptors_is_a_shortage() -> None:
    policy = MediaPolicy(None, 1000, ["127.0.0.1", "unknown.test"])
    for url in ("http://127.0.0.1:9", "http://unknown.test"):  # whose resolver reports an unknown name
        with no_descriptors(), pytest.raises(Shortage, match="file descriptors"):
            await fetch_http(url, policy, "image 1", lambda _: None)
