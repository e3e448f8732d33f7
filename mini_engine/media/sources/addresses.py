"""Hosts and IP addresses: which hosts the operator allows, and which addresses are public."""

import re
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from yarl import URL

Address = IPv4Address | IPv6Address
AllowedHost = tuple[str, int | None]
"""A host as `URL.raw_host` spells it, and a port; None allows every port."""
Network = IPv4Network | IPv6Network

# IANA's special-purpose registries, less the globally reachable entries; multicast; deprecated and returned blocks.
# Not `ipaddress.is_global`, whose table differs between Python versions.
_SPECIAL = [
    ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "2001::/23", "2001:db8::/32", "3fff::/20"),
    )
]
_GLOBAL_V6 = IPv6Network("2000::/3")  # the only block that IANA allocates global unicast addresses from
_NAT64 = IPv6Network("64:ff9b::/96")

_ENTRY = re.compile(r"(\[.*\]|[^\s:/?#@\\]+)(:[0-9]+)?")
_NAME = re.compile(r"([a-z0-9_-]{1,63}\.)*[a-z_][a-z0-9_-]{0,62}")  # 127.1 and 0x7f.1 are addresses to some resolvers


def parse_allowed_host(text: str) -> AllowedHost | Network:
    """Parses an operator's `host`, `host:port`, `v6`, `[v6]`, `[v6]:port` as clients' URLs are parsed, or a network.

    Raises ValueError, which names the entry.
    """
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
    """Whether the address belongs to one host on the public internet.

    An IPv6 address that embeds an IPv4 address (IPv4-mapped, 6to4, NAT64) counts as that one.
    """
    if isinstance(address, IPv6Address):
        nat64 = IPv4Address(address.packed[-4:]) if address in _NAT64 else None
        embedded = nat64 or address.ipv4_mapped or address.sixtofour
        if embedded is not None:
            return is_global(embedded)
        if address not in _GLOBAL_V6:
            return False
    return not any(address in network for network in _SPECIAL)
