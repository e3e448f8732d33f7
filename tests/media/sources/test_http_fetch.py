"""Downloads: what is sent and taken, and which hosts, addresses, answers and redirects are refused."""

import asyncio
import socket
import ssl
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mini_engine.media.sources import http_fetch
from mini_engine.media.sources.http_fetch import fetch_http
from mini_engine.media.sources.policy import BLOCK_BYTES, CountBytes, MediaPolicy
from mini_engine.protocol.api_errors import MediaError
from mini_engine.protocol.parts import MAX_URL_CHARACTERS
from tests.support.web import WebServer, chunked, make_certificate, response

LIMIT = 1 << 20
LOCAL = "127.0.0.1/32"
BODY = bytes(range(256)) * 2000
OK, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Names:
    """A resolver that records its calls. Names without addresses do not exist."""

    def __init__(self) -> None:
        self.names = {name: ["127.0.0.1"] for name in ("media.test", "other.test")}
        self.calls: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> list[Any]:
        self.calls.append((host, port))
        if host.lower() not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "secret detail 10.9.8.7")
        return [(0, 0, 0, "", (address, port)) for address in self.names[host.lower()]]


def download(url: str, policy: MediaPolicy, count_bytes: CountBytes = lambda _: None) -> bytes:
    return asyncio.run(fetch_http(url, policy, "video 1", count_bytes))


def refusal(url: str, policy: MediaPolicy) -> str:
    """The error's text, which must contain neither an address nor a message of the system."""
    with pytest.raises(MediaError, match="^video 1: ") as caught:
        download(url, policy)
    assert not any(secret in str(caught.value) for secret in ("127.0.0.1", "10.", "secret", "Errno", ".test"))
    return str(caught.value)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    monkeypatch.setattr(http_fetch, "getaddrinfo", names := Names())
    return names


@pytest.fixture
def policy(names: Names) -> MediaPolicy:
    """media.test is allowed and stands for this machine. Nothing else is allowed."""
    return MediaPolicy(None, LIMIT, ["media.test", LOCAL], 20)


def test_request_line_and_headers(policy: MediaPolicy, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # ignored
    names.names["xn--bcher-kva.test"] = ["127.0.0.1"]
    policy = replace(policy, allowed_media_domains=["bücher.test", LOCAL])
    with WebServer(response(BODY)) as server:
        assert download(f"HTTP://BÜCHER.Test:{server.port}/a%20b/ü?q=1&é#fragment", policy) == BODY
        signed = "/a%2Fb/../%7Ec?date=2026%2F11&empty&sign=a%2Bb+c%3d"  # left as it is
        assert download(f"http://xn--bcher-kva.test:{server.port}{signed}", policy) == BODY
    head = server.requests[0].split("\r\n")
    assert head[0] == "GET /a%20b/%C3%BC?q=1&%C3%A9 HTTP/1.1"
    assert server.requests[1].startswith(f"GET {signed} HTTP/1.1\r\n")
    assert f"Host: xn--bcher-kva.test:{server.port}" in head and "Accept-Encoding: identity" in head


def test_response_body_is_returned(policy: MediaPolicy) -> None:
    for answer in (
        CHUNKED + chunked(BODY[:1], BODY[1:70000], BODY[70000:]),
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\n" + response(BODY, Content_Encoding="Identity"),
    ):
        sizes: list[int] = []
        with WebServer(answer) as server:
            assert download(f"http://media.test:{server.port}", policy, sizes.append) == BODY
        assert sum(sizes) == len(BODY) and max(sizes) <= BLOCK_BYTES


def test_bad_response_is_refused(policy: MediaPolicy) -> None:
    codings = [b"gzip, chunked", b"gzip", b"chunked, chunked"]
    not_http = [b"", b"\x16\x03\x01\x00\xff" * 20000, OK + b"A: " + b"b" * 10000 + b"\r\n\r\n", CHUNKED + b"zz\r\nx"]
    truncated = [response(BODY, Content_Length=str(len(BODY) + 1)), CHUNKED + chunked(BODY)[:-5], CHUNKED + b"5\r\nabc"]
    for answer, hint in (
        *((response(BODY, f"{status} x"), f"status {status}") for status in (206, 404)),
        (response(b""), "is empty"),
        (response(BODY, Content_Encoding="identity, br"), "Content-Encoding"),
        (response(BODY, Content_Encoding="identity\r\nContent-Encoding: br"), "Content-Encoding"),
        *((OK + b"Transfer-Encoding: %b\r\n\r\n" % coding + chunked(BODY), "Transfer-Encoding") for coding in codings),
        (response(b"x", Content_Length=str(LIMIT + 1)), "--max-media-bytes"),
        *((answer, "closed the connection early or does not speak HTTP") for answer in not_http + truncated),
    ):
        with WebServer(answer) as server:
            assert hint in refusal(f"http://media.test:{server.port}/a.mp4", policy)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        *[(OK + b"\r\n", bytes(1 << 16)), (CHUNKED + b"7fffffff\r\n", bytes(1 << 16))],
        *[(OK + b"Content-Length: 5000\r\n\r\n", b"x"), (CHUNKED, b"0"), (OK, b"A"), (b"", b"HTTP/1.1 100 x\r\n\r\n")],
    ],
)
def test_endless_response_ends_at_a_limit(head: bytes, piece: bytes, policy: MediaPolicy) -> None:
    def endless(connection: socket.socket, _: str) -> None:
        connection.sendall(head)
        for _ in range(1000):
            connection.sendall(piece)
            time.sleep(0.05 if drips else 0)

    drips = len(piece) < 100
    with WebServer(endless) as server:
        text = refusal(f"http://media.test:{server.port}/", replace(policy, media_fetch_timeout=0.4 if drips else 20))
    assert ("within 0.4 seconds, the limit of --media-fetch-timeout" if drips else "--max-media-bytes") in text


def test_silent_server_and_cancellation(policy: MediaPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, closed = threading.Event(), threading.Event()

    def silent(connection: socket.socket, _: str) -> None:
        connection.sendall(OK + b"Content-Length: 9\r\n\r\nx")
        sent.set()
        connection.recv(1)
        closed.set()

    async def cancel(url: str) -> None:
        task = asyncio.create_task(fetch_http(url, policy, "video 1", lambda _: None))
        await asyncio.to_thread(sent.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(closed.wait, 60)

    with WebServer(silent) as server:
        asyncio.run(cancel(f"http://media.test:{server.port}/"))
        monkeypatch.setattr(http_fetch, "QUIET_SECONDS", 0.4)
        assert "sent nothing for 0.4 seconds" in refusal(f"http://media.test:{server.port}/", policy)


def test_silent_name_server_and_silent_tls_server(policy: MediaPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(http_fetch, "QUIET_SECONDS", 0.4)
        silent = refusal(f"https://media.test:{listener.getsockname()[1]}/", policy)
        monkeypatch.setattr(http_fetch, "getaddrinfo", lambda host, port: [done.wait(60)])
        assert silent == refusal("http://media.test/", policy) and "refuses connections or is unreachable" in silent
        assert "--media-fetch-timeout" in refusal("http://media.test/", replace(policy, media_fetch_timeout=0.2))
    done.set()


def test_unknown_host_unreachable_host_and_second_address(policy: MediaPolicy, names: Names) -> None:
    policy = replace(policy, allowed_media_domains=["media.test", "unknown.test", "127.0.0.0/8"])
    assert "cannot be resolved" in refusal("http://unknown.test/", policy)
    with WebServer(response(BODY)) as server:  # does not listen on 127.0.0.2
        names.names["media.test"] = ["127.0.0.2"]
        assert "unreachable" in refusal(f"http://media.test:{server.port}/", policy)
        names.names["media.test"] = ["127.0.0.2", "127.0.0.1"]
        assert download(f"http://media.test:{server.port}/", policy) == BODY


def test_host_with_a_private_address_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = MediaPolicy(None, LIMIT, ["media.test", "localhost", "127.0.0.1"])
    with WebServer(response(BODY)) as server:
        assert "private address" in refusal(f"http://localhost:{server.port}/", policy)
        for addresses in (["127.0.0.1"], ["::ffff:127.0.0.1"], ["93.184.215.14", "127.0.0.1"], ["fe80::1%lo"]):
            names = Names()
            names.names["media.test"] = addresses
            monkeypatch.setattr(http_fetch, "getaddrinfo", names)
            assert "its host has a private address" in refusal(f"http://media.test:{server.port}/", policy)
    assert server.dialled == 0


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.2", "127.0.0.1"]])
def test_host_with_an_address_in_a_listed_network_is_dialled(names: Names, addresses: list[str]) -> None:
    names.names |= {"media.test": addresses, "other.test": addresses, "elsewhere.test": [*addresses, "10.0.0.1"]}
    policy = MediaPolicy(None, LIMIT, ["media.test", "elsewhere.test", "127.0.0.0/8", "fd00::/8"])
    with WebServer(response(BODY)) as server:
        assert download(f"http://media.test:{server.port}/", policy) == BODY
        assert "list the network in --allowed-media-domains" in refusal(f"http://elsewhere.test:{server.port}/", policy)
        for host in ("127.0.0.1", "127.0.0.0", "other.test"):
            assert "does not list the URL's host" in refusal(f"http://{host}:{server.port}/", policy)
        listed = MediaPolicy(None, LIMIT, [f"127.0.0.1:{server.port}"])
        assert download(f"http://127.0.0.1:{server.port}/a", listed) == BODY
        for host in ("127.0.0.1:1", f"[::ffff:127.0.0.1]:{server.port}", f"127.1:{server.port}"):
            assert "--allowed-media-domains" in refusal(f"http://{host}/", listed)


def test_without_a_listed_host_http_urls_are_disabled() -> None:
    assert "http(s):// URLs are disabled; " in refusal("https://media.test/a.jpg", MediaPolicy(None, LIMIT))


def test_dns_rebinding_has_no_effect(policy: MediaPolicy, names: Names) -> None:
    def hang_up_first(connection: socket.socket, _: str) -> None:
        names.names["media.test"] = ["127.0.0.2"]  # which a second resolution would get
        if server.dialled > 1:
            connection.sendall(response(BODY))

    with WebServer(hang_up_first) as server:  # aiohttp sends the request again
        assert download(f"http://media.test:{server.port}/", policy) == BODY
    assert names.calls == [("media.test", server.port)]


def test_url_is_refused_before_its_name_is_resolved(policy: MediaPolicy, names: Names) -> None:
    urls = r"""
http://other.test/ http://sub.media.test/ http://media.test.other.test/ http://media.test:65536/ http://user@media.test/
http://media.test@other.test/ http://other.test#@media.test/ http://other.test\@media.test/ http://media.test\.other.test/
http://media.test%2eother.test/ http://127.0.0.1/ http://[::1/ http:///media.test/ http:media.test/ http:// http://127.1/
http://2130706433/ http://0x7f.1/ http://media.test./ http://media..test/ http://me%64ia.test/ ws://media.test/""".split()
    urls += ["http://med\tia.test/", "http://media.test/a\r\nHost: other.test", "http://media.test/a b"]
    urls += ["http://\ud800/", "http://media.test/\ud800", "http://" + "\ufdfa" * 10000, "http://me\u00addia.test/"]
    urls += ["http://media.test/" + "x" * MAX_URL_CHARACTERS]
    for url in urls:
        began = time.thread_time()
        refusal(url, policy)
        assert not names.calls and time.thread_time() - began < 0.2, url


def test_redirects(policy: MediaPolicy, names: Names) -> None:
    def answer(connection: socket.socket, request: str) -> None:
        number = int(request.split()[1].strip("/"))
        to = response(b"", "302 Found", Location=str(number - 1), Set_Cookie="a=b")
        connection.sendall(to if number else response(BODY))

    with WebServer(answer) as server:
        assert download(f"http://media.test:{server.port}/5", policy) == BODY
        assert names.calls == [("media.test", server.port)] * 6  # once per URL
        assert "more than 5 redirects" in refusal(f"http://media.test:{server.port}/6", policy)
    assert not any("cookie" in head.lower() for head in server.requests)


def test_redirect_is_checked_like_the_first_url(policy: MediaPolicy, names: Names) -> None:
    locations = (
        r"""
http://other.test:{port}/0 //other.test:{port}/0 http://127.0.0.1:{port}/0 file:///etc/passwd data:,x
http://private.test:{port}/0 //other.test\@media.test/""".split()
        + ["/a\tb", "/\xff"]
    )

    def answer(connection: socket.socket, request: str) -> None:
        to = locations[int(request.split()[1].strip("/"))].format(port=server.port).encode("latin-1")
        connection.sendall(b"HTTP/1.1 307 x\r\nLocation: " + to + b"\r\n\r\n")

    names.names["private.test"] = ["127.0.0.2"]
    policy = replace(policy, allowed_media_domains=["media.test", "private.test", LOCAL])
    with WebServer(answer) as server:
        for number in range(len(locations)):
            assert "after a redirect: " in refusal(f"http://media.test:{server.port}/{number}", policy)
    assert server.dialled == len(locations)


def test_tls(policy: MediaPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is for media.test and 127.0.0.1. All names resolve to the server."""
    certificate, key = make_certificate(tmp_path, "DNS:media.test,IP:127.0.0.1")
    context, names = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), []
    context.load_cert_chain(certificate, key)
    context.sni_callback = lambda _, name, __: names.append(name)
    hosts = ["media.test", "other.test", "127.0.0.1", LOCAL]
    policy = replace(policy, allowed_media_domains=hosts)
    monkeypatch.setattr(http_fetch, "tls_context", http_fetch.tls_context.__wrapped__)  # without its cache
    with WebServer(response(b"", "301 Moved", Location="http://media.test/"), tls=context) as server:
        assert "certificate must be valid" in refusal(f"https://media.test:{server.port}/", policy)  # not trusted
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert "certificate must be valid" in refusal(f"https://other.test:{server.port}/", policy)
        assert not server.requests
        for host in ("Media.test", "127.0.0.1"):
            assert "from https to http" in refusal(f"https://{host}:{server.port}/", policy)
    assert names == ["media.test", "other.test", "Media.test", None] and "Host: Media.test:" in server.requests[0]
