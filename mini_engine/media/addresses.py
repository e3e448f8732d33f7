"""Host names and IP addresses: one normal form for each way to write them, and which addresses are public.

The same functions read an operator's list of hosts and a client's URL, so the two cannot disagree. Knows nothing of
URLs beyond their `host:port`, and nothing of HTTP.
"""

import queue
import re
import socket
import threading
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple

Address = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Sequence[str]]
"""Host name and port -> its addresses as text. Raises OSError where there are none."""

# What IANA's special-purpose address registries do not call globally reachable, multicast, and what was handed back.
_SPECIAL_V4 = [
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
]
_GLOBAL_V6 = IPv6Network("2000::/3")  # all that has been given out for global unicast
_SPECIAL_V6 = [IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "3fff::/20")]
_NAT64 = IPv6Network("64:ff9b::/96")

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:@/\\?#%\[\]]+)(?::([0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_LONGEST_NAME = 253


class Authority(NamedTuple):
    """A host in its normal form, and the port, None where none was written.

    The host is a DNS name in lower-case ASCII, or an address as `str(ip_address)` writes it, without brackets.
    """

    host: str
    port: int | None


def parse_authority(text: str) -> Authority:
    """Reads `host`, `host:port`, `[v6]` or `[v6]:port`.

    An IPv4 address has one form, four decimal numbers; the others (one number, octal, hexadecimal, fewer parts) are
    refused, and so is whatever else ends in a number. A name with letters beyond ASCII becomes its `xn--` form if that
    stands for this very name; where IDNA would map it to another one (`ß`, full-width letters) it is refused. A user
    name, an empty port, an empty label (a dot at the end makes one) and a percent sign are refused too.

    Raises ValueError.
    """
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        raise ValueError("not a host with or without a port")
    host, port = match[1], None if match[2] is None else int(match[2])
    if port is not None and not 1 <= port <= 65535:
        raise ValueError("no such port")
    return Authority(str(IPv6Address(host[1:-1])) if host[0] == "[" else _normal_name(host), port)


def parse_allowed_host(text: str) -> Authority:
    """Reads an operator's entry: as `parse_authority`, and an IPv6 address need not have brackets.

    Raises ValueError, whose text names the entry.
    """
    try:
        if text.count(":") > 1 and not text.startswith("["):
            text = f"[{text}]"
        return parse_authority(text)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no exact host name or address, with or without a port, such as example.com or 127.0.0.1:8080"
        ) from error


def literal_address(host: str) -> Address | None:
    """The address that `host`, in its normal form, is; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_global(address: Address) -> bool:
    """Whether the address belongs to one host of the public internet.

    Not private, shared (carrier-grade NAT), loopback, link-local, multicast, documentation or reserved, nor an IPv6
    address that stands for such an IPv4 address (IPv4-mapped, 6to4, NAT64).
    """
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address in _NAT64:
        inner = IPv4Address(address.packed[-4:])
    if inner is not None:
        return is_global(inner)
    return address in _GLOBAL_V6 and not any(address in network for network in _SPECIAL_V6)


def resolve(host: str, port: int) -> list[str]:
    """The system's answer for a name, as text, in its order of preference. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def resolve_within(seconds: float, resolver: Resolver, host: str, port: int) -> list[Address]:
    """What `resolver` says, waited for at most so long. Raises OSError; TimeoutError if the time is up.

    getaddrinfo knows no time-out, so it runs in a thread of its own, which is left behind if it takes longer. It ends
    when the system's resolver gives up.
    """
    answer: queue.SimpleQueue[Sequence[str] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(resolver(host, port))
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be put into a DNS question
            answer.put(error)

    threading.Thread(target=ask, name="media-resolver", daemon=True).start()
    try:
        found = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, Exception):
        raise OSError("the name cannot be resolved") from found
    return [ip_address(address) for address in found]


def _normal_name(host: str) -> str:
    if len(host) > _LONGEST_NAME:
        raise ValueError("a host name has at most 253 characters")
    name = host.lower()
    if not name.isascii():
        encoded = name.encode("idna")
        if encoded.decode("idna") != name:
            raise ValueError("IDNA maps this name to another")
        name = encoded.decode("ascii")
    labels = name.split(".")
    if len(name) > _LONGEST_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("not a host name")
    return str(IPv4Address(name)) if _NUMBER.fullmatch(labels[-1]) else name
