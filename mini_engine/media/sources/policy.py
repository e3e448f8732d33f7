"""The media policy: which URLs may be fetched, and the limits that apply to their bytes.

The module does not parse URLs; `fetch.py`, `local_files.py` and `http_fetch.py` do.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mini_engine.media.media_errors import MediaError
from mini_engine.media.sources.addresses import Address, AllowedHost, Network, is_global, parse_allowed_host

Received = Callable[[int], None]
"""Receives the size of each downloaded block before the block is stored. An exception from it ends the fetch."""

Resolver = Callable[[str, int], Sequence[Any]]
"""Called in a thread with a host name and a port; returns and raises what `socket.getaddrinfo` does."""

BLOCK_BYTES = 1 << 18
"""Most bytes that are received or decoded at once."""

MAX_URL_CHARACTERS = 16384
"""Limit for `file://` and `http(s)://` URLs. `max_media_bytes` limits `data:` URLs."""


@dataclass(frozen=True)
class MediaPolicy:
    """Allowed sources and limits.

    Args:
        allowed_local_media_path: `file://` URLs may read below this directory; None disables them.
        max_media_bytes: most bytes of one encoded item.
        allowed_media_domains: the hosts that `http(s)://` URLs may name; empty disables them. An entry is a host name
            without wildcards, or an address. With `:port` the entry allows one port, otherwise every port. All
            addresses of a host name must pass `is_allowed_address`, or be in a network entry, such as `10.0.0.0/8`. An
            address entry, such as `127.0.0.1:8080`, allows URLs that contain it, and no host name that resolves to it.
        media_fetch_timeout: most seconds for one `http(s)` item, from the name resolution to the last byte.
        resolve: resolves host names. It is called once per URL; the connection goes to an address that it returned.
        is_allowed_address: whether a host name may resolve to this address; the default allows public addresses.

    Raises:
        ValueError: an entry of `allowed_media_domains` is not valid, or all of them are networks.
    """

    allowed_local_media_path: Path | None
    max_media_bytes: int
    allowed_media_domains: Sequence[str] = ()
    media_fetch_timeout: float = 30.0
    resolve: Resolver = socket.getaddrinfo
    is_allowed_address: Callable[[Address], bool] = is_global
    allowed_hosts: frozenset[AllowedHost | Network] = field(init=False)

    def __post_init__(self) -> None:
        hosts = frozenset(parse_allowed_host(entry) for entry in self.allowed_media_domains)
        if hosts and not any(isinstance(entry, tuple) for entry in hosts):
            raise ValueError("a network needs a host name beside it; list the hosts, too")
        object.__setattr__(self, "allowed_hosts", hosts)

    def may_connect(self, address: Address) -> bool:
        """Whether a listed host name may resolve to the address."""
        networks = [entry for entry in self.allowed_hosts if not isinstance(entry, tuple)]
        return self.is_allowed_address(address) or any(address in network for network in networks)

    def check_size(self, nbytes: int, item: str) -> None:
        """Raises MediaError for an item of more bytes than the limit."""
        if nbytes > self.max_media_bytes:
            problem = f"larger than {self.max_media_bytes} bytes, the limit of --max-media-bytes; send a smaller file"
            raise MediaError(item, problem)

    def checked(self, data: bytes, item: str) -> bytes:
        """The data. Raises MediaError for more bytes than the limit, or none."""
        self.check_size(len(data), item)
        if not data:
            raise MediaError(item, "is empty")
        return data
