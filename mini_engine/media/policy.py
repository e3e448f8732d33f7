"""What media may be fetched, and how their bytes are gathered under its limits.

Knows nothing of URLs: each kind has its own file.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from mini_engine.media import addresses
from mini_engine.media.addresses import Address, Authority, Resolver
from mini_engine.media.errors import FetchCancelled, MediaError

Received = Callable[[int], None]
"""Is told how many bytes each block has, before it is kept beside those before it; what it raises ends the fetch."""

BLOCK_BYTES = 1 << 18
"""How much is read or decoded between two looks at the limits."""


@dataclass(frozen=True)
class MediaPolicy:
    """What may be fetched. What cannot work is a ValueError here, at start, not at the first request.

    Args:
        allowed_local_media_path: the directory below which `file://` URLs may read, which must exist; None: no files.
        max_media_bytes: most bytes of one item, as they are fetched.
        allowed_media_domains: the hosts that `http(s)://` URLs may name; none: no such URLs. An entry is an exact host
            name, whatever its case and without wildcards, or an address. With `:port` it allows that port alone,
            without it every port. A name's addresses must all pass `is_allowed_address`. An entry that is itself an
            address, such as `127.0.0.1:8080` or `[::1]:8080`, allows URLs that hold this very address, public or not:
            the operator has named it. It allows no name that resolves to it.
        allow_media_redirects: whether an HTTP server may send us on. Each step must again be a host of the list, is
            resolved and checked anew, and may not lead from https to http.
        media_fetch_timeout: most seconds for an `http(s)` item, from the name's resolution to the last byte.
        resolve: how a name becomes addresses. It is asked once for each step, and what is dialled is what it said.
        is_allowed_address: which addresses a name may have; the default lets public ones pass.
    """

    allowed_local_media_path: Path | None
    max_media_bytes: int
    allowed_media_domains: Sequence[str] = ()
    allow_media_redirects: bool = False
    media_fetch_timeout: float = 30.0
    resolve: Resolver = addresses.resolve
    is_allowed_address: Callable[[Address], bool] = addresses.is_global
    allowed_hosts: frozenset[Authority] = field(init=False)

    def __post_init__(self) -> None:
        root = self.allowed_local_media_path
        if root is not None and not Path(root).is_dir():
            raise ValueError("--allowed-local-media-path must name a directory that exists")
        if self.max_media_bytes < 1:
            raise ValueError("the limit on media bytes must be at least 1")
        if not 0 < self.media_fetch_timeout < threading.TIMEOUT_MAX:
            raise ValueError("--media-fetch-timeout must be above 0 seconds")
        try:
            hosts = frozenset(addresses.parse_allowed_host(entry) for entry in self.allowed_media_domains)
        except ValueError as error:
            raise ValueError(f"--allowed-media-domains: {error}") from error
        object.__setattr__(self, "allowed_hosts", hosts)

    def allows_host(self, host: str, port: int) -> bool:
        """Whether a URL may name this host, in its normal form, with this port."""
        return not self.allowed_hosts.isdisjoint({Authority(host, None), Authority(host, port)})


def gather(
    blocks: Iterable[bytes],
    policy: MediaPolicy,
    item: str,
    cancelled: threading.Event | None,
    received: Received | None = None,
) -> bytes:
    """All the blocks in one bytes object. Takes no block after the one that passes a limit or the cancellation.

    Raises MediaError if there are too many bytes, or none; FetchCancelled; what `received` raises.
    """
    data = BytesIO()  # hands over its buffer without a copy
    for block in blocks:
        if cancelled is not None and cancelled.is_set():
            raise FetchCancelled
        if data.tell() + len(block) > policy.max_media_bytes:
            raise too_large(policy, item)
        if received is not None:
            received(len(block))
        data.write(block)
    if not data.tell():
        raise MediaError(item, "holds no bytes")
    return data.getvalue()


def too_large(policy: MediaPolicy, item: str) -> MediaError:
    """The error of an item above the limit on bytes."""
    problem = f"larger than {policy.max_media_bytes} bytes, the limit of --max-media-bytes; send a smaller file"
    return MediaError(item, problem)
