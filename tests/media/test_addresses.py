import socket
from ipaddress import ip_address

import pytest

from mini_engine.media.addresses import Authority, is_global, parse_allowed_host, parse_authority, resolve_within


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("Example.COM", "example.com", None),
        ("example.com:8080", "example.com", 8080),
        ("my_host-1", "my_host-1", None),
        ("127.0.0.1:1", "127.0.0.1", 1),
        ("[0:0::1]:65535", "::1", 65535),
        ("[::FFFF:127.0.0.1]", "::ffff:7f00:1", None),
        ("Bücher.example", "xn--bcher-kva.example", None),
        ("1a.example", "1a.example", None),
        ("1.example", "1.example", None),
    ],
)
def test_authorities(text: str, host: str, port: int | None) -> None:
    authority = parse_authority(text)
    assert (authority.host == host or ip_address(authority.host) == ip_address(host)) and authority.port == port
    assert parse_allowed_host(text) == authority


@pytest.mark.parametrize(
    "text",
    [
        *("", ":80", "a:", "a:-1", "a:+1", "a:1_0", "a:99999", "a:80:80", "a b", "a/b", "a@b", "a\\b", "a%41", "a?b"),
        *(
            "a..b",
            ".a",
            "a.",
            "-a",
            "a-",
            "*",
            "*.a",
            "a" * 64,
            "a." * 127 + "a",
            "a\n",
            "ß.example",
            "x\u200d.example",
        ),
        *("2130706433", "0x7f.0.0.1", "0177.0.0.1", "127.1", "127.0.0.01", "127.0.0.256", "1.2.3.4.5", "a.0x1", "a.1"),
        *("127.0.0.1.", "[127.0.0.1]", "[::1", "::1]", "[::1%eth0]", "[1:2]", "[]", "[v1.x]", "\u0661\u0662.0.0.1"),
    ],
)
def test_what_is_no_authority(text: str) -> None:
    with pytest.raises(ValueError):
        parse_authority(text)


def test_an_operator_may_leave_out_brackets() -> None:
    assert parse_allowed_host("::1") == Authority("::1", None)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.0.1",
            "169.254.169.254",
            "172.31.0.1",
            "192.0.0.8",
        ),
        *("192.0.2.1", "192.88.99.1", "192.168.0.1", "198.19.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1"),
        *("239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%lo", "fec0::1", "fc00::1"),
        *("fd00::1", "ff02::1", "ff0e::1", "100::1", "2001::1", "2001:db8::1", "2001:20::1", "3fff::1", "5f00::1"),
        *("::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::1", "64:ff9b::10.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b:1::1", "4000::1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_global(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        *("1.1.1.1", "93.184.215.14", "100.63.255.255", "172.32.0.1", "223.255.255.255", "2606:4700:4700::1111"),
        *("2a00:1450:4001:80b::200e", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1", "2002:101:101::1"),
    ],
)
def test_public_addresses(address: str) -> None:
    assert is_global(ip_address(address))


def test_no_stricter_rule_of_the_standard_library_is_missed() -> None:
    """What ipaddress calls not global is not public here either, except where an IPv4 address inside is."""
    for step in range(1 << 12):
        for address in (ip_address(step << 20 | 0x101), ip_address(step << 116 | 0x101)):
            assert not is_global(address) or (address.is_global and not address.is_multicast), address


def test_resolving() -> None:
    def nonsense(host: str, port: int) -> list[str]:
        raise UnicodeError

    def nothing(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    assert resolve_within(60, lambda host, port: ["1.1.1.1", "::1"], "x", 1) == [
        ip_address("1.1.1.1"),
        ip_address("::1"),
    ]
    for resolver in (nonsense, nothing):
        with pytest.raises(OSError):
            resolve_within(60, resolver, "x", 1)
