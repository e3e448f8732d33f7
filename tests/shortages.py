"""A process that is out of file descriptors or threads, while a block runs."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

import pytest

STANDARD = 3  # descriptors that stay open: input, output, errors


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Each further one is EMFILE, even if one that is open is closed meanwhile, as by the garbage collector."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Starting one fails as in the interpreter; those that run go on."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield
