"""Which requests may be answered, by the header Host and by API key, and the client of each.

Used by API servers and by the cluster's front.
"""

import contextlib
import fnmatch
import hashlib
import hmac
import ipaddress
import re
import socket
from typing import Any

from starlette.datastructures import Headers

from mini_engine.config import EngineConfig
from mini_engine.http.routes import playground
from mini_engine.protocol.api_errors import ApiError

CLIENT_BYTES = 8
SHARED_KEY = "x-shared-key"  # a header of requests whose API key is the cluster's own, since its clients need none
OPEN_PATHS = ("/health", "/live")  # no API key, no check of the host, no line in the log
WRONG_KEY = "Incorrect or missing API key: send a valid one in the header 'Authorization: Bearer KEY'."
HOST = re.compile(r"(?P<host>[\w-]+(\.[\w-]+)*\.?|\[[\da-f:.]+\])(:\d*)?", re.ASCII)
ID_CHARACTERS = 128  # of a client's request id; more are cut off
TRACE_PARENT = re.compile(r"(?!ff)[\da-f]{2}-(?!0{32})([\da-f]{32})-(?!0{16})[\da-f]{16}-[\da-f]{2}(-.*)?")
PRIVATE_NAMES = ("*.localhost", "*.local", "*.internal")  # reserved: public DNS has none of them


class Access:
    """Checks requests as `config` says."""

    def __init__(self, config: EngineConfig):
        # Digests have one length, so that the comparison does not show the length of the right key.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in dict.fromkeys(config.api_key)]
        names = config.allowed_hosts
        if not names and (config.api_key or config.uds or config.ssl_certfile):
            names = ["*"]  # a page of another name has no key, no certificate and no unix socket
        self._names = [name.lower() for name in (*names, *PRIVATE_NAMES, config.host, socket.gethostname())]
        self._keyless = (*OPEN_PATHS, *(() if config.disable_playground else playground.PATHS))

    def check(self, path: str, headers: Headers, is_preflight: bool = False) -> int:
        """The `key_number`. Raises ApiError for a request that is not answered: see `check_host`; 401 without a valid
        key. A browser's preflight has no key."""
        if path not in OPEN_PATHS:
            self.check_host(headers)
        number = self.key_number(headers)
        if self._digests and not number and path not in self._keyless and not is_preflight:
            raise ApiError(401, WRONG_KEY, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return number

    def check_host(self, headers: Headers) -> None:
        """Raises ApiError, a 421, for a name that may be another's (DNS rebinding): a web page can have its own name
        resolve to this server, and its browser then lets it read the answers.

        Such a name is in public DNS. An IP address, a name without a dot and a private one are not.
        """
        if "*" in self._names:
            return
        name = headers.get("host", "localhost").lower()
        parsed = HOST.fullmatch(name)
        host = parsed["host"].rstrip(".") if parsed else ""
        is_private = "." not in host or host.rpartition(".")[2].isdecimal()
        if not parsed or not (is_private or any(fnmatch.fnmatchcase(host, pattern) for pattern in self._names)):
            text = (
                f"This server does not answer to the host name {name[:80]!r}. Start it with --allowed-hosts and this "
                "name, or ask for its IP address."
            )
            raise ApiError(421, text, code="invalid_http")

    def has_key(self, headers: Headers) -> bool:
        """Whether there is a valid key, or none is required."""
        return not self._digests or self.key_number(headers) > 0

    def key_number(self, headers: Headers) -> int:
        """Which of the keys a request has, from 1; 0: none of them. Takes as long for a key that is nearly right as for
        any other."""
        digest = _key_digest(headers) if self._digests else b""
        return sum([number * hmac.compare_digest(digest, key) for number, key in enumerate(self._digests, 1)])

    def client_of(self, headers: Headers, address: tuple[str, int] | None) -> bytes:
        """Names the client of a request that may be answered, by its API key, if there are keys, else by its peer's
        address, which a Unix socket does not have: of IPv6 by its /64, any address of which a client may have."""
        if self._digests:
            return _key_digest(headers)[:CLIENT_BYTES]
        host = address[0] if address else ""
        with contextlib.suppress(ValueError):  # a proxy may send anything
            ip = ipaddress.ip_address(host.partition("%")[0])
            if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is None:
                host = ip.packed[:8].hex()
        return hashlib.sha256(host.encode()).digest()[:CLIENT_BYTES]

    def name_scope(self, headers: Headers) -> bytes:
        """Stands for the API key, within which names of media are known; empty where clients have none of their own."""
        return b"" if not self._digests or SHARED_KEY in headers else _key_digest(headers)[:CLIENT_BYTES]


def _key_digest(headers: Headers) -> bytes:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return hashlib.sha256(key.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else b"").digest()


def caller_of(headers: Headers, address: tuple[str, int] | None) -> dict[str, Any]:
    """Who sent a request, in the words of its log lines: fields of their JSON objects, and the end of their texts.

    `client` is the `address`, which a Unix socket does not have; `x_request_id` and `trace_id` are those of the
    headers X-Request-Id and traceparent (W3C Trace Context, section 3.2), if there are valid ones."""
    trace = TRACE_PARENT.fullmatch(headers.get("traceparent", ""))
    fields = {
        "client": _visible(address[0] if address else ""),  # a proxy may send anything
        "x_request_id": _visible(headers.get("x-request-id", "")),
        "trace_id": trace[1] if trace else "",
    }
    return {name: text for name, text in fields.items() if text}


def _visible(text: str) -> str:
    """Without spaces and what else could look like another field or line."""
    return re.sub(r"[^!-~]", "", text)[:ID_CHARACTERS]
