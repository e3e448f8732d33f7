"""Shared by the media tests: downloads with names of their own."""

import asyncio
import socket
from typing import Any

import pytest

from mini_engine.media.errors import MediaError
from mini_engine.media.http_fetch import fetch_http
from mini_engine.media.policy import MediaPolicy, Received

LIMIT = 1 << 20
BODY = bytes(range(256)) * 2000


class Names:
    """A resolver that records its calls. `Names(a_test=[...])` resolves a.test; other names do not exist."""

    def __init__(self, **names: list[str]):
        self.names = {name.replace("_", "."): found for name, found in names.items()}
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> list[Any]:
        self.asked.append((host, port))
        if host.lower() not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "secret detail 10.9.8.7")
        return [(0, 0, 0, "", (address, port)) for address in self.names[host.lower()]]


def download(url: str, policy: MediaPolicy, received: Received = lambda _: None) -> bytes:
    return asyncio.run(fetch_http(url, policy, "video 1", received))


def refusal(url: str, policy: MediaPolicy) -> str:
    """The error's text, which must contain neither an address nor a message of the system."""
    with pytest.raises(MediaError, match="^video 1: ") as caught:
        download(url, policy)
    assert not any(secret in str(caught.value) for secret in ("127.0.0.1", "10.", "secret", "Errno", ".test"))
    return str(caught.value)


@pytest.fixture
def names() -> Names:
    return Names(media_test=["127.0.0.1"], other_test=["127.0.0.1"])


@pytest.fixture
def policy(names: Names) -> MediaPolicy:
    """media.test is allowed and stands for this machine. Nothing else is allowed."""
    return MediaPolicy(
        None,
        LIMIT,
        allowed_media_domains=["media.test"],
        media_fetch_timeout=20,
        resolve=names,
        is_allowed_address=lambda address: str(address) == "127.0.0.1",
    )
