"""The media policy: which files, hosts and addresses media may come from, and how many bytes.

Knows an operator's list of hosts; `fetch.py`, `local_files.py` and `http_fetch.py` parse clients' URLs.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path

from yarl import URL

from mini_engine.protocol.api_errors import MediaError

Address = IPv4Address | IPv6Address
AllowedHost = tuple[str, int | None]  # a host as `URL.raw_host` spells it, and a port; None allows every port
Network = IPv4Network | IPv6Network
# Receives the size of each downloaded block before the block is stored. An exception from it ends the fetch.
CountBytes = Callable[[int], None]

BLOCK_BYTES = 1 << 18  # received or decoded at once

# IANA's special-purpose registries, less the globally reachable entries; multicast; deprecated and returned blocks.
# Not `ipaddress.is_global`, whose table differs between Python versions.
_SPECIAL = """0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4
2001::/23 2001:db8::/32 3fff::/20""".split()
_SPECIAL_NETWORKS = [ip_network(network) for network in _SPECIAL]
_GLOBAL_V6 = IPv6Network("2000::/3")  # the only block that IANA allocates global unicast addresses from
_NAT64 = IPv6Network("64:ff9b::/96")

_ENTRY = re.compile(r"(\[.*\]|[^\s:/?#@\\]+)(:[0-9]+)?")
_NAME = re.compile(r"([a-z0-9_-]{1,63}\.)*[a-z_][a-z0-9_-]{0,62}")  # 127.1 and 0x7f.1 are addresses to some resolvers


def parse_allowed_host(text: str) -> AllowedHost | Network:
    """Parses an operator's `host`, `host:port`, `v6`, `[v6]`, `[v6]:port` as clients' URLs are parsed, or a network.
    Raises ValueError, which names the entry."""
    entry = f"[{text}]" if text.count(":") > 1 and text[0] != "[" else text
    with suppress(ValueError):
        if "/" in text:
            return ip_network(text)
        url = URL(f"http://{entry}/")
        host = str(url.raw_host)
        if _ENTRY.fullmatch(entry) and (_NAME.fullmatch(host) or ip_address(host)):
            return host, url.explicit_port
    raise ValueError(f"{text!r} is not a host name or address with an optional port, such as a.example:80, or network")


def is_global(address: Address) -> bool:
    """Whether the address belongs to one host on the public internet. An IPv6 address that embeds an IPv4 address
    (IPv4-mapped, 6to4, NAT64) counts as that one."""
    if isinstance(address, IPv6Address):
        nat64 = IPv4Address(address.packed[-4:]) if address in _NAT64 else None
        embedded = nat64 or address.ipv4_mapped or address.sixtofour
        if embedded is not None:
            return is_global(embedded)
        if address not in _GLOBAL_V6:
            return False
    return not any(address in network for network in _SPECIAL_NETWORKS)


@dataclass(frozen=True)
class MediaPolicy:
    """Allowed sources and limits. Raises ValueError: an entry of `allowed_media_domains` is not valid, or all are
    networks."""

    allowed_local_media_path: Path | None  # `file://` URLs may read below this directory; None disables them
    max_media_bytes: int  # of one encoded item
    allowed_media_domains: Sequence[str] = ()  # as the flag's help says; empty disables `http(s)://` URLs
    media_fetch_timeout: float = 30.0  # seconds for one `http(s)` item, from the name resolution to the last byte
    allowed_hosts: frozenset[AllowedHost | Network] = field(init=False)

    def __post_init__(self) -> None:
        hosts = frozenset(parse_allowed_host(entry) for entry in self.allowed_media_domains)
        if hosts and not any(isinstance(entry, tuple) for entry in hosts):
            raise ValueError("a network needs a host name beside it; list the hosts, too")
        object.__setattr__(self, "allowed_hosts", hosts)

    def may_connect(self, address: Address) -> bool:
        """Whether a listed host name may resolve to the address."""
        networks = [entry for entry in self.allowed_hosts if not isinstance(entry, tuple)]
        return is_global(address) or any(address in network for network in networks)

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
