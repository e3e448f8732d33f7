"""The hosts that clients may ask for, and the client of a request."""

import socket
from typing import Any

import pytest
from starlette.datastructures import Headers

from mini_engine.config import EngineConfig
from mini_engine.http.access import Access
from mini_engine.protocol.api_errors import ApiError


@pytest.mark.parametrize(
    ("settings", "allowed", "is_public"),
    [
        ({"host": "my.test"}, ["my.test"], False),
        ({"allowed_hosts": ["my.test", "*.Example"]}, ["MY.test:80", "a.example"], False),
        ({"allowed_hosts": ["*"]}, [], True),
        ({"api_key": ["k"]}, [], True),
        ({"api_key": ["k"], "allowed_hosts": ["my.test"]}, ["my.test"], False),
    ],
)
def test_host_must_be_local_or_allowed(settings: dict[str, Any], allowed: list[str], is_public: bool) -> None:
    access = Access(EngineConfig(**settings))
    local = ["localhost:8000", "127.0.0.1", "[::1]:8000", "engine:8000", "Box.local.", socket.gethostname()]
    public = ["evil.test", "evil.test:8000", "127.0.0.1.evil.test", "localhost.evil.test", "example.test"]
    invalid = ["", "[::1].evil.test", "evil.test\\.local", "evil.test/.local", "evil test.local", "a..local"]
    for host in [*local, *allowed, *(public if is_public else ())]:
        access.check_host(Headers({"host": host}))
    for host in () if is_public else (*public, *invalid):
        with pytest.raises(ApiError, match="--allowed-hosts"):
            access.check_host(Headers({"host": host}))


def test_client_is_known_by_its_key_or_address_of_ipv6_by_its_64() -> None:
    keyed, keyless = Access(EngineConfig(api_key=["a", "b"])), Access(EngineConfig())
    first, same, other = (
        keyed.client_of(Headers({"authorization": key}), ("::1", 1)) for key in ("Bearer a", "bearer  a", "Bearer b")
    )
    assert first == same != other
    addresses = ["2001:db8::1", "2001:db8::2:1", "2001:db8:0:1::1", "192.0.2.1", "::ffff:192.0.2.1", "unknown"]
    clients = [keyless.client_of(Headers(), (address, 1)) for address in addresses]
    assert len(set(clients)) == 5 and clients[0] == clients[1]
