"""Media by name: what the `uuid` of a part means in one request, and from then on in others.

A name means a content digest. All that follows, settings, budgets and caches, is as if the content had been sent, but
that its bytes are absent: of what the engine does not have, a URL is fetched after all, and a name alone is an error.
A name is known within one API key and one `cache_salt`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import replace

from starlette.datastructures import State

from mini_engine import metrics
from mini_engine.engine_client.engines import EngineHandle
from mini_engine.http.context import AppContext
from mini_engine.media.hashing import name_key, url_hash
from mini_engine.media.loader import Candidates, FetchedItem
from mini_engine.media.processor import ProcessedItem
from mini_engine.media.sources.fetch import is_elsewhere
from mini_engine.messages import NamedMedia
from mini_engine.prompt.renderer import collect_media
from mini_engine.protocol.api_errors import ApiError, bad_request
from mini_engine.protocol.bodies import GenerationRequest
from mini_engine.protocol.parts import MediaRef

OPEN = "a `uuid` alone needs a `cache_salt` or an API key, since other clients may use the same; or send the data"
NOT_FOUND = "this server does not have what this `uuid` names, or not with these settings; send the data"
AMBIGUOUS = "this `uuid` names another content before in this request; a name has one content"


async def resolve_names(context: AppContext, body: GenerationRequest, state: State) -> list[MediaRef]:
    """The media of a conversation, of which those with a `uuid` have a key. A name alone is `named`, and so is a URL
    that was downloaded under its name before; unless this request has sent the name with data, or this URL, before:
    then it is that part again, by its `name` too if its settings are the same.

    Raises ApiError: 400 for too many items, and for a name alone that other clients may use; EngineError.
    """
    refs = collect_media(body.parts, context.config.item_limits)
    if not any(ref.uuid for ref in refs):
        return refs
    client = state.client if context.config.api_key else b""
    keys = [name_key(ref.uuid, ref.modality, body.cache_salt, client) if ref.uuid else b"" for ref in refs]
    homes: defaultdict[EngineHandle, list[bytes]] = defaultdict(list)
    for key in {key for ref, key in zip(refs, keys, strict=True) if key and (not ref.url or is_elsewhere(ref.url))}:
        homes[context.engines.preferred(key)].append(key)
    answers = await asyncio.gather(*(home.media.resolve_names(state.request_id, own) for home, own in homes.items()))
    named = {key: media for answer in answers for key, media in answer.items()}
    resolved: list[MediaRef] = []
    sent: dict[bytes, MediaRef] = {}
    for ref, key in zip(refs, keys, strict=True):
        first = sent.get(key)
        if first and (not ref.url or (ref.url == first.url and is_elsewhere(ref.url))):
            ref = first if ref.settings == first.settings else replace(first, name=ref.name, settings=ref.settings)
        elif key and not (ref.url or client or body.cache_salt):
            raise bad_request(f"{ref.name}: {OPEN}.", "cache_salt", "missing_required_parameter")
        elif key:
            ref = replace(ref, key=key, named=_meaning(ref.url, key, named.get(key)))
            if ref.url:
                sent.setdefault(key, ref)
        resolved.append(ref)
    return resolved


def _meaning(url: str, key: bytes, bound: NamedMedia | None) -> NamedMedia | None:
    if not url:
        return bound or NamedMedia(key, is_frames=True)  # a digest that nothing is found by
    return bound if bound and bound.url == url_hash(url) else None


class UrlsAbsent(Exception):
    """No engine has what URLs with the names of these `keys` were downloaded as: `fetch_absent`, and look up
    again."""

    def __init__(self, keys: Set[bytes | None]):
        super().__init__()
        self.keys = keys


def check_named(items: Sequence[FetchedItem], held: Container[bytes]) -> None:
    """Checks that each item has its bytes, or that an engine has it: its hash is in `held`. Raises ApiError: 404 for
    names alone of others, 400 for two contents under one name; UrlsAbsent."""
    named = dict.fromkeys(item for item in items if item.ref.named)
    absent = [item for item in named if item.media_hash not in held]
    if unknown := [item.name for item in absent if not item.ref.url]:
        raise ApiError(404, f"{', '.join(unknown)}: {NOT_FOUND}.", code="media_not_found", param="messages")
    if absent:
        raise UrlsAbsent({item.ref.key for item in absent})
    digests: dict[bytes, bytes] = {}
    for item in items:
        key, digest = item.ref.key, item.content.digest
        if key and digests.setdefault(key, digest) != digest:
            raise bad_request(f"{item.name}: {AMBIGUOUS}.", "messages")


def count_hits(items: Sequence[Candidates]) -> None:
    """The engine has a request with these."""
    metrics.media_named_hits_total.inc(len({item[0] for item in items if item[0].ref.named}))


async def fetch_absent(
    context: AppContext, items: Sequence[Candidates], absent: UrlsAbsent, state: State, held: AsyncExitStack
) -> list[Candidates]:
    """`items` with the bytes of all URLs with the names that are `absent`, which have room until `held` is closed: of
    one URL no part means what was downloaded before, and another what is there now. Raises as `MediaLoader.fetch`."""
    late = {item[0].name: item for item in items if item[0].ref.url and item[0].ref.key in absent.keys}
    share = held.enter_context(context.media_bytes.reserve())
    state.clock.enter("fetch")
    urls = [replace(item[0].ref, named=None) for item in late.values()]
    settings = [[candidate.settings for candidate in item] for item in late.values()]
    fetched = dict(zip(late, await context.media.fetch(urls, settings, share.receive), strict=True))
    state.clock.enter("other")
    return [fetched.get(item[0].name, item) for item in items]


def bind_names(context: AppContext, items: Sequence[FetchedItem], processed: Mapping[bytes, ProcessedItem]) -> None:
    """The names of these mean them from now on, which are `processed`, or which the engine has; but not of a video of
    which a part is missing. Raises EngineError."""
    for item in items:
        ref, content = item.ref, item.content
        is_alone = ref.named is not None and not ref.url
        is_whole = item.media_hash not in processed or processed[item.media_hash].missing is None
        if ref.key and is_whole and not is_alone:
            media = NamedMedia(content.digest, url_hash(ref.url) if ref.url else b"", content.frames is not None)
            if media != ref.named:
                context.engines.preferred(ref.key).media.bind_name(ref.key, media)
