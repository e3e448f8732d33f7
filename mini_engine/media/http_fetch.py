"""Downloads `http(s)://` URLs from the hosts that the policy allows.

One parser reads the URL for the check and for the request. A host name is resolved once per URL, every address is
checked, and the connection goes to one of these addresses, so DNS rebinding has no effect. TLS and the Host header use
the name. A redirect repeats all checks. Proxies of the environment are ignored: they would resolve the name again.

The server is not trusted: each read has a time limit (`_TimedSocket`) and the body a byte limit (`gather`). HTTP itself
is the standard library's `http.client`.
"""

import io
import re
import socket
import ssl
import threading
from contextlib import suppress
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from ipaddress import ip_address
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from mini_engine.media.addresses import Address, parse_authority, resolve_within
from mini_engine.media.errors import FetchCancelled, MediaError
from mini_engine.media.policy import BLOCK_BYTES, MediaPolicy, Received, gather, too_large
from mini_engine.shortage import check_descriptors, raise_if_short

QUIET_SECONDS = 10.0
"""Most seconds for a name resolution, a connection attempt, a TLS handshake, and between two bytes of a response."""

_POLL_SECONDS = 0.5  # between two checks of the cancellation
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_DEFAULT_PORTS = {"http": 80, "https": 443}
_FORBIDDEN = re.compile("[\x00-\x20\x7f-\x9f\\\\\ud800-\udfff]")  # urlsplit removes some; parsers disagree on others
_URL_CHARACTERS = "/%:@!$&'()*+,;=~-._?[]"  # `quote` keeps them


class _Refused(Exception):
    """The reason for the client. Not a ValueError, because http.client catches some of those."""


class _HttpUrl(NamedTuple):
    url: str
    scheme: str
    host: str  # normalized
    port: int
    target: str  # path and query in ASCII


class _Deadline:
    """The time limit and the cancellation of one fetch."""

    def __init__(self, seconds: float, cancelled: threading.Event | None):
        self._seconds = seconds
        self._end = monotonic() + seconds
        self._cancelled = cancelled

    def remaining(self, at_most: float) -> float:
        """Seconds that the next step may take. Raises _Refused after the time limit, FetchCancelled."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise FetchCancelled
        remaining = self._end - monotonic()
        if remaining <= 0:
            raise _Refused(f"not fetched within {self._seconds:g} seconds, the limit of --media-fetch-timeout")
        return min(remaining, at_most)


class _TimedSocket(io.RawIOBase):
    """The methods of a socket that `http.client` uses, with a time limit on each wait. It does not own the socket."""

    def __init__(self, sock: socket.socket, deadline: _Deadline):
        self._sock = sock
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._deadline.remaining(QUIET_SECONDS))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(self, BLOCK_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        started = monotonic()
        while True:
            self._sock.settimeout(self._deadline.remaining(_POLL_SECONDS))
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                if monotonic() - started > QUIET_SECONDS:
                    raise _Refused(f"the server sent nothing for {QUIET_SECONDS:g} seconds") from None

    def close(self) -> None:
        """Does nothing: http.client closes its socket before it reads the body."""


def fetch_http(
    url: str, policy: MediaPolicy, item: str, cancelled: threading.Event | None, received: Received | None
) -> bytes:
    """Returns the body of a 200 response. Compressed bodies are refused, so the byte limit covers what is returned.

    Raises MediaError, FetchCancelled, Shortage, what `received` raises.
    """
    deadline = _Deadline(policy.media_fetch_timeout, cancelled)
    prefix = ""
    try:
        current = _parse_allowed(url, policy)
        for _ in range(1 + _MAX_REDIRECTS):
            with (
                _connect(current, policy, deadline) as plain,
                _start_tls(plain, current, deadline) as sock,
                _send_request(current, sock, deadline) as response,
            ):
                if response.status not in _REDIRECTS:
                    return _read_body(response, policy, item, received)
                location = response.getheader("location")
            if not policy.allow_media_redirects:
                raise _Refused("the server sent a redirect, which is followed only with --allow-media-redirects")
            prefix = "after a redirect: "
            current = _redirected(current, location, policy)
        raise _Refused(f"more than {_MAX_REDIRECTS} redirects")
    except _Refused as refused:
        raise MediaError(item, f"{prefix}{refused}") from refused
    except (OSError, HTTPException) as error:
        raise_if_short(error)
        raise MediaError(item, f"{prefix}the server closed the connection early or does not speak HTTP") from error


def check_http(url: str, policy: MediaPolicy, item: str) -> None:
    """Checks the syntax and the host of `url` without resolving the name. Raises MediaError."""
    try:
        _parse_allowed(url, policy)
    except _Refused as refused:
        raise MediaError(item, str(refused)) from refused


def _parse_allowed(url: str, policy: MediaPolicy) -> _HttpUrl:
    if not policy.allowed_hosts:
        raise _Refused("http(s) URLs are disabled; start the server with --allowed-media-domains, or send a data: URL")
    if _FORBIDDEN.search(url):
        raise _Refused("the URL contains spaces, control characters or backslashes; percent-encode them")
    try:
        parts = urlsplit(url)
        host, port = parse_authority(parts.netloc)
    except ValueError as error:
        raise _Refused(
            "the URL needs a valid host and no user name: https://host/path or https://host:port/path"
        ) from error
    if parts.scheme not in _DEFAULT_PORTS:
        raise _Refused("the URL is not an http(s) URL")
    port = port or _DEFAULT_PORTS[parts.scheme]
    if not policy.allows_host(host, port):
        raise _Refused("--allowed-media-domains does not list the URL's host with its port")
    target = quote(parts.path or "/", safe=_URL_CHARACTERS)
    if parts.query:
        target += "?" + quote(parts.query, safe=_URL_CHARACTERS)
    return _HttpUrl(url, parts.scheme, host, port, target)


def _redirected(current: _HttpUrl, location: str | None, policy: MediaPolicy) -> _HttpUrl:
    try:
        # http.client decodes headers as Latin-1, but a URL beyond ASCII is in UTF-8.
        text = (location or "").encode("latin-1").decode()
        if not text or _FORBIDDEN.search(text):  # urljoin removes some of these
            raise ValueError("not a URL")
        target = _parse_allowed(urljoin(current.url, text), policy)
    except ValueError as error:
        raise _Refused("the redirect contains no valid URL") from error
    if current.scheme == "https" and target.scheme == "http":
        raise _Refused("the redirect leads from https to http")
    return target


def _resolve(url: _HttpUrl, policy: MediaPolicy, deadline: _Deadline) -> list[Address]:
    """The addresses to connect to. One forbidden address refuses the host, even beside allowed ones."""
    with suppress(ValueError):
        return [ip_address(url.host)]  # the operator listed this address, so it may be private
    try:
        found = resolve_within(deadline.remaining(QUIET_SECONDS), policy.resolve, url.host, url.port)
    except OSError as error:
        deadline.remaining(QUIET_SECONDS)
        check_descriptors()  # a resolver that is out of descriptors reports an unknown name
        raise _Refused("the URL's host cannot be resolved") from error
    if not all(policy.is_allowed_address(address) for address in found):
        raise _Refused("the URL's host is not on the public internet")
    return found


def _connect(url: _HttpUrl, policy: MediaPolicy, deadline: _Deadline) -> socket.socket:
    for address in _resolve(url, policy, deadline):
        timeout = deadline.remaining(QUIET_SECONDS)
        try:
            return socket.create_connection((str(address), url.port), timeout)
        except OSError as error:
            raise_if_short(error)
    deadline.remaining(QUIET_SECONDS)
    raise _Refused("the URL's host refuses connections or is unreachable")


def _start_tls(sock: socket.socket, url: _HttpUrl, deadline: _Deadline) -> socket.socket:
    """Checks that the certificate is valid for the host. Returns `sock` itself for http."""
    if url.scheme == "http":
        return sock
    sock.settimeout(deadline.remaining(QUIET_SECONDS))
    try:
        return tls_context().wrap_socket(sock, server_hostname=url.host)
    except TimeoutError as error:
        deadline.remaining(QUIET_SECONDS)
        raise _Refused(f"no TLS connection within {QUIET_SECONDS:g} seconds") from error
    except ssl.SSLError as error:
        check_descriptors()  # OpenSSL reports a missing CA file if it is out of descriptors
        raise _Refused("no TLS connection: the server's certificate must be valid for the URL's host") from error


@cache
def tls_context() -> ssl.SSLContext:
    """Trusts the system's certificates, or those of SSL_CERT_FILE and SSL_CERT_DIR.

    Call it once at start: without a free descriptor OpenSSL would load no certificates, and the cache would keep that.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _send_request(url: _HttpUrl, sock: socket.socket, deadline: _Deadline) -> HTTPResponse:
    """Sends the request and reads the response headers."""
    connection = HTTPConnection(url.host, url.port)
    connection.default_port = _DEFAULT_PORTS[url.scheme]  # the Host header omits it
    connection.sock = _TimedSocket(sock, deadline)
    headers = {"User-Agent": "mini-engine", "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
    connection.request("GET", url.target, headers=headers)
    return connection.getresponse()


def _read_body(response: HTTPResponse, policy: MediaPolicy, item: str, received: Received | None) -> bytes:
    if response.status != 200:
        raise _Refused(f"the server responded with status {response.status}")
    for header, supported in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        if response.getheader(header, supported).strip().lower() != supported:
            raise _Refused(f"the response has a {header} other than {supported}")
    length = response.getheader("content-length", "0").strip()
    if not (length.isascii() and length.isdecimal()):  # http.client would ignore it
        raise _Refused("the response has an invalid Content-Length")
    if response.length is not None and response.length > policy.max_media_bytes:
        raise too_large(policy, item)
    # read() takes a chunk size of -1 for "everything"; read1() returns at most one buffer.
    read = response.read1 if response.chunked else response.read
    data = gather(iter(partial(read, BLOCK_BYTES), b""), policy, item, received=received)
    if response.length:
        raise _Refused("the server sent less than its Content-Length")
    return data
