"""Which host a request prefers: rendezvous hashing of its media key over hosts, with bounded load.

The key is equal for requests that share their first media item, by its `uuid` if it has one, since only the host that
was sent its data knows what the name means. It names no content: hosts hash what they fetch, with the request's
`cache_salt`, so a wrong key costs a decode, never a wrong answer, and requests with other salts on the same host share
nothing.

Each key orders all hosts; the order among the hosts that stay does not change when others come or go. So a host that
leaves moves only its own keys, and one that joins takes a fair part of each other's (Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", 1998). The bound on load follows Mirrokni, Thorup and Zadimoghaddam,
"Consistent hashing with bounded loads", 2018. Knows nothing of Ray.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from mini_engine.protocol.body_split import MAX_STRUCTURE, URL_FIELDS, SplitBody, count_structure
from mini_engine.protocol.parts import MAX_URL_CHARACTERS

# Fields of parts, and where in each is a URL; first of all the client's name.
FIELDS = {"uuid": "", **dict.fromkeys(URL_FIELDS, "url"), "file": "file_data"}
TEXT = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
QUERIES, DOCUMENTS = ("query", "queries", "text_1"), ("documents", "text_2")  # fields of rankings
TEXTS = ("prompt", "input", *QUERIES)  # of requests without messages
# Query parameters of signed URLs of Amazon S3, Google Cloud Storage, CloudFront and Azure: new for each request.
_SIGNATURE = re.compile(
    r"x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|key-pair-id|policy|signature|expires"
    r"|sig|se|st|sp|sv|sr|sip|spr|ske|skt|sks|skv|skoid|sktid",
    re.IGNORECASE,
)

LOAD_FACTOR = 1.25  # of the mean load, which a host may have and still be preferred
LOAD_MARGIN = 4  # requests above that: with few in flight the mean says little, and a spilled video decodes twice


def media_key(body: SplitBody, path: str) -> str:
    """The key of a request's JSON body: of the first media item of its messages or items, or of query and documents,
    else of the first of these, its prompt or its query; without a body that of its path.

    A body that is not such an object has a key, too: the engine refuses it.
    """
    try:
        text, urls = body.split()
        if not text or count_structure(text, items=8) > MAX_STRUCTURE:
            return _hash(text or path.encode())
        request = msgspec.json.decode(text, type=dict[str, Any])
        for field, known_by in _media(request):
            if field == "uuid":
                return _hash(msgspec.json.encode([known_by, request.get("cache_salt")]))
            return _hash(urls[known_by].data if known_by in urls else _identity(known_by))
        items = request.get("messages", request.get("input"))
        texts = items if isinstance(items, list) else (request[name] for name in TEXTS if name in request)
        return _hash(msgspec.json.encode(next(iter(texts), None)))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _hash(path.encode())


def _media(request: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """By which field each item is known, and the name or URL there."""
    for name in ("messages", "input", *QUERIES, *DOCUMENTS):
        value = request.get(name)
        for message in value if isinstance(value, list) else [value]:
            parts = message.get("content") or message.get("output") if isinstance(message, dict) else None
            for part in parts if isinstance(parts, list) else ():
                yield from _known_by(part)


def _known_by(part: Any) -> Iterator[tuple[str, str]]:
    """Of one part."""
    if isinstance(part, dict) and part.get("type") not in TEXT:
        for field, inner in FIELDS.items():
            location = part.get(field)
            text = location.get(inner) if isinstance(location, dict) else location
            if isinstance(text, str):
                yield field, text


def _identity(url: str) -> bytes:
    """Of a `data:` URL what follows the media type; of another what does not change from request to request."""
    if url.startswith("data:"):
        return url[url.find(",") + 1 :].encode()
    if len(url) > MAX_URL_CHARACTERS:  # the engine refuses it
        return url.encode()
    try:
        parts = urlsplit(url)
    except ValueError:  # the engine refuses it
        return url.encode()
    kept = [pair for pair in parse_qsl(parts.query, keep_blank_values=True) if not _SIGNATURE.fullmatch(pair[0])]
    return parts._replace(query=urlencode(kept), fragment="").geturl().encode()


def _hash(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def preference(key: str, hosts: Iterable[str]) -> list[str]:
    """The hosts in the order of this key."""
    return sorted(hosts, key=lambda host: hashlib.blake2b(f"{key} {host}".encode(), digest_size=8).digest())


def ranked(key: str, loads: Mapping[str, int], avoided: Collection[str] = ()) -> list[str]:
    """All hosts, best first: in the order of `key`, but those above the bound later, and those to avoid last.

    Args:
        loads: requests in flight of each host.
    """
    bound = LOAD_FACTOR * sum(loads.values()) / max(1, len(loads)) + LOAD_MARGIN
    return sorted(preference(key, loads), key=lambda host: (host in avoided, loads[host] >= bound))
