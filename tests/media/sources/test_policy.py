"""Hosts that an operator allows, and addresses that are public."""

from ipaddress import ip_address, ip_network

import pytest

from mini_engine.media.sources.policy import is_global, parse_allowed_host


def test_only_public_addresses_are_global() -> None:
    private = """
0.0.0.0 10.1.2.3 100.64.0.1 127.0.0.1 127.255.0.1 169.254.169.254 172.31.0.1 192.0.0.8 192.0.2.1 192.88.99.1 192.168.0.1
198.19.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 :: ::1 fe80::1 fe80::1%lo fec0::1
fc00::1 fd00::1 ff02::1 ff0e::1 100::1 2001::1 2001:db8::1 2001:20::1 3fff::1 5f00::1 ::127.0.0.1 ::ffff:127.0.0.1
::ffff:10.0.0.1 2002:7f00:1:: 2002:a00:1::1 64:ff9b::10.0.0.1 64:ff9b::7f00:1 64:ff9b:1::1 4000::1"""
    public = """
1.1.1.1 93.184.215.14 100.63.255.255 172.32.0.1 223.255.255.255 2606:4700:4700::1111 2a00:1450:4001:80b::200e
::ffff:1.1.1.1 64:ff9b::1.1.1.1 2002:101:101::1"""
    assert [address for address in private.split() if is_global(ip_address(address))] == []
    assert [address for address in public.split() if not is_global(ip_address(address))] == []
    for step in range(1 << 12):  # nothing is missing that the standard library refuses
        for address in (ip_address(step << 20 | 0x101), ip_address(step << 116 | 0x101)):
            assert not is_global(address) or (address.is_global and not address.is_multicast), address


def test_host_is_normalized() -> None:
    hosts = {
        **{"Example.COM": ("example.com", None), "example.com:8080": ("example.com", 8080), "my_x-1": ("my_x-1", None)},
        **{"127.0.0.1:1": ("127.0.0.1", 1), "[0:0::1]:65535": ("::1", 65535), "0::1": ("::1", None)},
        **{text: ip_network(text) for text in ("10.0.0.0/8", "fd00::/8", "192.168.1.7/32")},
        **{"Bücher.example": ("xn--bcher-kva.example", None), "1.example": ("1.example", None)},
    }
    assert {text: parse_allowed_host(text) for text in hosts} == hosts


def test_ambiguous_or_invalid_host_is_refused() -> None:
    hosts = "a:99999 a/b http://a.b 2130706433 127.1 *.a [::1 10.0.0.1/8 a.test/8".split()
    for text in (*hosts, "", "a b"):
        with pytest.raises(ValueError, match="is not a host name or address"):
            parse_allowed_host(text)
