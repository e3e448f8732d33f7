"""Host names and IP addresses: normalization, name resolution, and which addresses are public.

The allowed hosts of the operator and the URLs of clients go through the same parser. The module knows nothing of HTTP,
and of URLs only the `host:port` part.
"""

import re
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

Address = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host name and port as text. Raises OSError if there are none."""

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

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:@/\\?#%\[\]]+)(?::([0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class Authority(NamedTuple):
    """A normalized host and a port, None where the text has no port.

    The host is a DNS name in lower-case ASCII, or an address as `str(ip_address)` writes it, without brackets.
    """

    host: str
    port: int | None


def parse_authority(text: str) -> Authority:
    """Parses `host`, `host:port`, `[v6]` or `[v6]:port`. Raises ValueError.

    Refuses what parsers disagree on: IPv4 addresses other than four decimal numbers and all other names that end in a
    number, user names, empty ports, empty labels (as from a dot at the end), percent signs, and names that IDNA maps to
    another name (`ß`, full-width letters). Other names beyond ASCII become their `xn--` form.
    """
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        raise ValueError("not a host with an optional port")
    host, port = match[1], None if match[2] is None else int(match[2])
    if port is not None and not 1 <= port <= 65535:
        raise ValueError("port out of range [1, 65535]")
    return Authority(str(IPv6Address(host[1:-1])) if host[0] == "[" else _normal_name(host), port)


def parse_allowed_host(text: str) -> Authority:
    """Parses an operator's entry like `parse_authority`; an IPv6 address may lack its brackets.

    Raises:
        ValueError: the text names the entry.
    """
    try:
        return parse_authority(f"[{text}]" if text.count(":") > 1 and text[0] != "[" else text)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not a host name or address with an optional port, such as a.example:80"
        ) from error


def is_global(address: Address) -> bool:
    """Whether the address belongs to one host on the public internet.

    False for private, shared (carrier-grade NAT), loopback, link-local, multicast, documentation and reserved
    addresses, and for IPv6 addresses that embed such an IPv4 address (IPv4-mapped, 6to4, NAT64).
    """
    if isinstance(address, IPv6Address):
        nat64 = IPv4Address(address.packed[-4:]) if address in _NAT64 else None
        embedded = nat64 or address.ipv4_mapped or address.sixtofour
        if embedded is not None:
            return is_global(embedded)
        if address not in _GLOBAL_V6:
            return False
    return not any(address in network for network in _SPECIAL)


def resolve(host: str, port: int) -> list[str]:
    """The system resolver's addresses for a name, in its order of preference. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def resolve_within(seconds: float, resolver: Resolver, host: str, port: int) -> list[Address]:
    """Calls `resolver` with a timeout. Raises OSError, TimeoutError.

    getaddrinfo has no timeout, so it runs in a daemon thread, which lives on after a timeout until the system's
    resolver returns.
    """
    answer: Future[list[Address]] = Future()

    def ask() -> None:
        try:
            answer.set_result([ip_address(address) for address in resolver(host, port)])
        except (OSError, ValueError) as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="media-resolver", daemon=True).start()
    try:
        return answer.result(timeout=seconds)
    except ValueError as error:
        raise OSError("DNS cannot encode the name") from error


def _normal_name(host: str) -> str:
    if len(host) > 253:  # before the IDNA encoder, whose time grows with the square of the length
        raise ValueError("host name too long")
    name = host.lower()
    if not name.isascii():
        encoded = name.encode("idna")
        if encoded.decode("idna") != name:
            raise ValueError("IDNA maps this name to another name")
        name = encoded.decode("ascii")
    labels = name.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("not a host name")
    return str(IPv4Address(name)) if _NUMBER.fullmatch(labels[-1]) else name
