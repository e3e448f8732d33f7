"""Downloads `http(s)://` URLs from the hosts that the policy allows, with aiohttp.

A URL is parsed once: aiohttp requests the object that was checked, whose host is, but for capitals, one that the
operator listed. A host name is resolved once per URL, every address is checked, and the connection goes to one of these
addresses, so DNS rebinding has no effect. TLS and the Host header use the name. A redirect repeats all checks, and must
not lead from https to http.
"""

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from ipaddress import ip_address
from socket import getaddrinfo

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from mini_engine.media.sources.policy import BLOCK_BYTES, CountBytes, MediaPolicy
from mini_engine.protocol.api_errors import MediaError, out_of
from mini_engine.protocol.parts import MAX_URL_CHARACTERS

# Limit for a name resolution, for a connection with its TLS handshake, and between two reads of a response.
QUIET_SECONDS = 10.0
# Trusts the system's certificates, or those of SSL_CERT_FILE and SSL_CERT_DIR. Call it once at start: without a free
# descriptor OpenSSL would load no certificates, and the cache would keep that.
tls_context = cache(ssl.create_default_context)
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "mini-engine", "Accept-Encoding": "identity"}
# Characters that yarl drops, and hosts that are longer than DNS names: the IDNA encoder would take up to a second.
_REFUSED = re.compile("[\x00-\x20\x7f-\x9f\\\\\ud800-\udfff]|^[^/?#]*//[^/?#]{260}")
# Not the event loop's threads: getaddrinfo has no timeout, and a hung DNS server must not delay other work.
_LOOKUPS = ThreadPoolExecutor(32, "media-resolver")


async def fetch_http(url: str, policy: MediaPolicy, item: str, count_bytes: CountBytes) -> bytes:
    """Returns the body of a 200 response. Compressed bodies are refused, so the byte limit covers what is returned.
    Raises MediaError, OSError: see `out_of`; what `count_bytes` raises."""
    target, name = parse_http(url, policy, item), item
    try:
        async with asyncio.timeout(policy.media_fetch_timeout) as time_limit:
            for _ in range(1 + _MAX_REDIRECTS):
                async with _request(target, policy, name) as response:
                    if response.status not in _REDIRECTS:
                        return await _read_body(response, policy, name, count_bytes)
                    location = response.headers.get("Location", "")
                name = f"{item}: after a redirect"
                target = parse_http(location, policy, name, base=target)
            raise MediaError(item, f"more than {_MAX_REDIRECTS} redirects")
    except (aiohttp.ClientError, OSError) as error:
        if out_of(error):
            raise
        os.close(os.open("/", os.O_RDONLY))  # or OSError: name resolution and OpenSSL hide that no descriptor is free
        problem = f"not fetched within {policy.media_fetch_timeout:g} seconds, the limit of --media-fetch-timeout"
        raise MediaError(name, problem if time_limit.expired() else _problem(error)) from error


def parse_http(text: str, policy: MediaPolicy, item: str, base: URL | None = None) -> URL:
    """The URL, or the target of a redirect from `base`. Raises MediaError unless the policy allows its host."""
    try:
        if len(text) > MAX_URL_CHARACTERS or _REFUSED.search(text):
            raise ValueError("refused unparsed")
        url = URL(text, encoded=text.isascii())  # left as it is: a signature may cover it
        url = url if base is None else base.join(url)
        if url.scheme not in ("http", "https") or "@" in url.raw_authority:
            raise ValueError("not an http(s) URL, or with a user name")
        host, port = (url.raw_host or "").lower(), url.port
    except ValueError as error:
        problem = f"the URL must be http(s)://host/path, with no user name, of at most {MAX_URL_CHARACTERS} characters"
        raise MediaError(item, f"{problem}; percent-encode spaces, control characters, backslashes") from error
    if base is not None and base.scheme == "https" and url.scheme == "http":
        raise MediaError(item, "redirect from https to http")
    if not policy.allowed_hosts:
        problem = "http(s):// URLs are disabled; send a data: URL, or start the server with --allowed-media-domains"
        raise MediaError(item, problem)
    if policy.allowed_hosts.isdisjoint({(host, None), (host, port)}):
        raise MediaError(item, "--allowed-media-domains does not list the URL's host with its port; send a data: URL")
    return url


@asynccontextmanager
async def _request(url: URL, policy: MediaPolicy, item: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """Sends the request. The session serves this URL only: it has no cookies, and its DNS cache holds one answer."""
    resolver = _Resolver(policy, item)
    connector = aiohttp.TCPConnector(resolver=resolver, ttl_dns_cache=None, force_close=True, ssl=tls_context())
    timeout = aiohttp.ClientTimeout(sock_connect=QUIET_SECONDS, sock_read=QUIET_SECONDS)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, headers=_HEADERS, auto_decompress=False) as session,
        session.get(url, allow_redirects=False) as response,
    ):
        yield response


@dataclass(eq=False)
class _Resolver(AbstractResolver):
    """Resolves host names for aiohttp. Addresses in URLs need no check, because the operator listed them."""

    policy: MediaPolicy
    item: str

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:  # noqa: ARG002
        """The addresses to connect to. One forbidden address refuses the host. Raises MediaError, OSError."""
        async with asyncio.timeout(QUIET_SECONDS):
            infos = await asyncio.get_running_loop().run_in_executor(_LOOKUPS, getaddrinfo, host, port)
        addresses = dict.fromkeys(str(info[4][0]) for info in infos)
        if not all(self.policy.may_connect(ip_address(address)) for address in addresses):
            raise MediaError(self.item, "its host has a private address; list the network in --allowed-media-domains")
        return [ResolveResult(hostname=host, host=ip, port=port, family=0, proto=0, flags=0) for ip in addresses]

    async def close(self) -> None:
        """Nothing is open."""


async def _read_body(response: aiohttp.ClientResponse, policy: MediaPolicy, item: str, count: CountBytes) -> bytes:
    if response.status != 200:
        raise MediaError(item, f"the server responded with status {response.status}")
    for header, supported in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        if any(coding.lower() != supported for coding in response.headers.getall(header, [])):
            raise MediaError(item, f"the response has a {header} other than {supported}")
    policy.check_size(response.content_length or 0, item)
    data = BytesIO()  # getvalue() returns the buffer without a copy
    async for block in response.content.iter_chunked(BLOCK_BYTES):
        policy.check_size(data.tell() + len(block), item)
        count(len(block))
        data.write(block)
    return policy.checked(data.getvalue(), item)


def _problem(error: Exception) -> str:
    match error:
        case aiohttp.SocketTimeoutError():
            return f"the server sent nothing for {QUIET_SECONDS:g} seconds"
        case aiohttp.ClientSSLError():
            return "no TLS connection: the server's certificate must be valid for the URL's host"
        case aiohttp.ClientConnectorDNSError():
            return "the URL's host cannot be resolved"
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return "the URL's host refuses connections or is unreachable"
    return "the server closed the connection early or does not speak HTTP"
