"""What the tests of HTTP downloads share: a resolver of their own, and what an error may not tell."""

import socket
from typing import Any

import pytest

from mini_engine.media.errors import MediaError
from mini_engine.media.fetch import MediaPolicy, fetch

LIMIT = 1 << 20
BODY = bytes(range(256)) * 2000


class Names:
    """A resolver that notes what it is asked. Names that it does not know do not exist."""

    def __init__(self, **names: list[str]):
        self.names = {name.replace("_", "."): found for name, found in names.items()}
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "secret detail 10.9.8.7")
        return self.names[host]


def refusal(url: str, policy: MediaPolicy, **kwargs: Any) -> str:
    """The error's text. It tells neither where the name leads to nor what the system said."""
    with pytest.raises(MediaError) as caught:
        fetch(url, policy, "video 1", **kwargs)
    text = str(caught.value)
    assert text.startswith("video 1: ")
    assert "127.0.0.1" not in text and "10." not in text and "secret" not in text and "Errno" not in text
    return text
