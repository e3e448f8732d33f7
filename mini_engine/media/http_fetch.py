"""`http(s)://` URL -> bytes of a host that the policy allows.

One parser reads the URL for the check and for the request. A name is resolved once, each of its addresses is checked,
and the connection goes to one of those; the name serves for TLS and for the Host header. A redirect, where they are
followed, starts over with the check. The environment's proxies are not used: they would resolve the name again.

What the server sends is hostile until shown otherwise: every read of it is bounded in time (`_Reader`) and in bytes
(`gather`). HTTP itself is the standard library's `http.client`.
"""

import io
import re
import socket
import ssl
import threading
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from time import monotonic
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from mini_engine.media.addresses import Address, literal_address, parse_authority, resolve_within
from mini_engine.media.errors import FetchCancelled, MediaError
from mini_engine.media.policy import BLOCK_BYTES, MediaPolicy, Received, gather, too_large
from mini_engine.media.shortage import check_host, raise_if_short

QUIET_SECONDS = 10.0
"""Most seconds for a name's resolution, for one attempt to connect, and between two bytes of an answer."""

_POLL_SECONDS = 0.5  # how often a wait for bytes looks at the cancellation
_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_DEFAULT_PORT = {"http": 80, "https": 443}
# urlsplit drops some of these, and parsers disagree on the backslash.
_FORBIDDEN = re.compile("[\x00-\x20\x7f-\x9f\\\\\ud800-\udfff]")
_URL_CHARACTERS = "/%:@!$&'()*+,;=~-._?[]"  # what `quote` leaves alone


class _Refused(Exception):
    """Why nothing was fetched, for the client. No ValueError, since http.client catches some of those."""


@dataclass(frozen=True)
class _HttpUrl:
    url: str
    scheme: str
    host: str  # in its normal form
    port: int
    target: str  # path and query, in ASCII

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORT[self.scheme] else f"{host}:{self.port}"


class _Clock:
    """The time and the cancellation of one fetch."""

    def __init__(self, seconds: float, cancelled: threading.Event | None):
        self._seconds = seconds
        self._deadline = monotonic() + seconds
        self._cancelled = cancelled

    def left(self, most: float) -> float:
        """Seconds that a step may take, up to `most`. Raises _Refused if the time is up, FetchCancelled."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise FetchCancelled
        left = self._deadline - monotonic()
        if left <= 0:
            raise _Refused(f"not fetched within {self._seconds:g} seconds, the limit of --media-fetch-timeout")
        return min(left, most)


class _Reader(io.RawIOBase):
    """A socket's bytes. Every wait for them is bounded, however they are asked for: headers, chunk sizes, bodies."""

    def __init__(self, sock: socket.socket, clock: _Clock):
        self._sock = sock
        self._clock = clock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        quiet_since = monotonic()
        while True:
            self._sock.settimeout(self._clock.left(_POLL_SECONDS))
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                if monotonic() - quiet_since > QUIET_SECONDS:
                    raise _Refused(f"its server sent nothing for {QUIET_SECONDS:g} seconds") from None


class _Line:
    """What http.client needs of a socket. It closes nothing: the socket has an owner."""

    def __init__(self, sock: socket.socket, clock: _Clock):
        self._sock = sock
        self._clock = clock

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._clock.left(QUIET_SECONDS))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Reader(self._sock, self._clock), BLOCK_BYTES)

    def close(self) -> None:
        pass


def fetch_http(
    url: str, policy: MediaPolicy, item: str, cancelled: threading.Event | None, received: Received | None
) -> bytes:
    """The body of a 200 answer, as it is: compressed ones are refused, so what is counted is what is returned.

    Raises MediaError, FetchCancelled, Shortage, what `received` raises.
    """
    clock = _Clock(policy.media_fetch_timeout, cancelled)
    step = ""
    try:
        here = _allowed(url, policy)
        for _ in range(1 + _MOST_REDIRECTS):
            with closing(_connect(here, policy, clock)) as sock, _ask(here, sock, clock) as response:
                if response.status not in _REDIRECTS:
                    return _body(response, policy, item, cancelled, received)
                location = response.getheader("location")
            if not policy.allow_media_redirects:
                raise _Refused("its server redirects, which is not enabled; start with --allow-media-redirects")
            step = "after a redirect: "
            here = _next(here, location, policy)
        raise _Refused(f"more than {_MOST_REDIRECTS} redirects")
    except _Refused as refused:
        raise MediaError(item, f"{step}{refused}") from refused
    except (OSError, HTTPException) as error:
        raise_if_short(error)
        raise MediaError(item, f"{step}its server broke off, or does not speak HTTP") from error


def check_http(url: str, policy: MediaPolicy, item: str) -> None:
    """Whether `url` is of a form and names a host that may be fetched. Resolves nothing. Raises MediaError."""
    try:
        _allowed(url, policy)
    except _Refused as refused:
        raise MediaError(item, str(refused)) from refused


def _allowed(url: str, policy: MediaPolicy) -> _HttpUrl:
    if not policy.allowed_hosts:
        raise _Refused(
            "fetching http(s) URLs is not enabled; start the server with --allowed-media-domains, "
            "or send the bytes in a data: URL"
        )
    parsed = _parse(url)
    if not policy.allows_host(parsed.host, parsed.port):
        raise _Refused("the URL's host, with its port, is none that --allowed-media-domains names")
    return parsed


def _parse(url: str) -> _HttpUrl:
    if _FORBIDDEN.search(url):
        raise _Refused("an http(s) URL holds no spaces, control characters or backslashes; percent-encode them")
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise _Refused("an http(s) URL must not hold a user name or a password")
        host, port = parse_authority(parts.netloc)
    except ValueError as error:
        raise _Refused("the URL has no valid host: https://host/path or https://host:port/path") from error
    if parts.scheme not in _DEFAULT_PORT:
        raise _Refused("the URL is not an http(s) URL")
    target = quote(parts.path or "/", safe=_URL_CHARACTERS)
    if parts.query:
        target += "?" + quote(parts.query, safe=_URL_CHARACTERS)
    return _HttpUrl(url, parts.scheme, host, port or _DEFAULT_PORT[parts.scheme], target)


def _next(here: _HttpUrl, location: str | None, policy: MediaPolicy) -> _HttpUrl:
    """Where a redirect leads, checked as if the client had sent it."""
    try:
        # http.client reads headers as Latin-1; a URL that is not in ASCII is in UTF-8.
        text = (location or "").encode("latin-1").decode()
        if not text or _FORBIDDEN.search(text):  # before urljoin, which drops some
            raise _Refused("the redirect holds no valid URL")
        there = _allowed(urljoin(here.url, text), policy)
    except ValueError as error:
        raise _Refused("the redirect holds no valid URL") from error
    if here.scheme == "https" and there.scheme == "http":
        raise _Refused("the redirect leads from https to http")
    return there


def _addresses(url: _HttpUrl, policy: MediaPolicy, clock: _Clock) -> list[Address]:
    """The addresses that may be dialled. One that may not be is an error even beside others that may."""
    literal = literal_address(url.host)
    if literal is not None:
        return [literal]  # the operator has named it
    try:
        found = resolve_within(clock.left(QUIET_SECONDS), policy.resolve, url.host, url.port)
    except OSError as error:
        clock.left(QUIET_SECONDS)
        check_host()  # a resolver that could open nothing says that it has found nothing
        raise _Refused("the URL's host cannot be resolved") from error
    if not all(policy.is_allowed_address(address) for address in found):
        raise _Refused("the URL's host is not on the public internet")
    return found


def _connect(url: _HttpUrl, policy: MediaPolicy, clock: _Clock) -> socket.socket:
    """A connection to the first address that takes one, for https with TLS up and the host's certificate checked."""
    for address in _addresses(url, policy, clock):
        sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
        try:
            sock.settimeout(clock.left(QUIET_SECONDS))
            sock.connect((str(address), url.port))
            if url.scheme == "https":
                sock.settimeout(clock.left(QUIET_SECONDS))
                sock = tls_context().wrap_socket(sock, server_hostname=url.host)
            return sock
        except ssl.SSLError as error:
            with sock:  # of an authority's file that could not be opened OpenSSL says that there is none
                check_host()
            raise _Refused("no TLS connection: the server's certificate must be valid for the URL's host") from error
        except OSError as error:
            sock.close()
            raise_if_short(error)
        except (_Refused, FetchCancelled):
            sock.close()
            raise
    clock.left(QUIET_SECONDS)
    raise _Refused("the URL's host takes no connection")


@cache
def tls_context() -> ssl.SSLContext:
    """The system's trusted certificates, or those that SSL_CERT_FILE and SSL_CERT_DIR name.

    To be called once while there are descriptors: without one their file would count as empty, and so for ever.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _ask(url: _HttpUrl, sock: socket.socket, clock: _Clock) -> HTTPResponse:
    """Sends the request and reads the answer's headers."""
    connection = HTTPConnection(url.host, url.port)
    connection.sock = _Line(sock, clock)
    headers = {
        "Host": url.host_header,
        "User-Agent": "mini-engine",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }
    connection.request("GET", url.target, headers=headers)
    return connection.getresponse()


def _body(
    response: HTTPResponse,
    policy: MediaPolicy,
    item: str,
    cancelled: threading.Event | None,
    received: Received | None,
) -> bytes:
    if response.status != 200:
        raise _Refused(f"its server answered with status {response.status}")
    if response.getheader("content-encoding", "identity").strip().lower() != "identity":
        raise _Refused("its server sends it compressed (Content-Encoding), which is not taken")
    if response.getheader("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise _Refused("its server sends it with a Transfer-Encoding that is not taken")
    declared = response.getheader("content-length", "0").strip()
    if not (declared.isascii() and declared.isdecimal()):  # http.client takes such a body up to the connection's end
        raise _Refused("its server sends a Content-Length that is no number of bytes")
    if response.length is not None and response.length > policy.max_media_bytes:
        raise too_large(policy, item)
    # read() takes a chunk size of -1 for "all there is"; read1() takes one buffer at most, whatever the size says.
    read = response.read1 if response.chunked else response.read
    data = gather(iter(partial(read, BLOCK_BYTES), b""), policy, item, cancelled, received)
    if response.length:
        raise _Refused("its server sent less than it announced")
    return data
