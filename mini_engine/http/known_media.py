"""Media that need not be sent, or decoded: what names mean, and what an engine has.

A name, the `uuid` of a part, means a content digest, within one API key and one `cache_salt`. All that follows,
settings, budgets and caches, is as if the content had been sent, but that its bytes are absent: if the request's engine
does not have it, a URL is fetched after all, and a name alone is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mini_engine.engine_client.engines import EngineClient, EngineHandle
from mini_engine.http.context import AppContext, RequestState
from mini_engine.media.hashing import HASH_BYTES, content_digest, name_key
from mini_engine.media.loader import Candidates, ContentUrl, FetchedItem, download_url_of
from mini_engine.media.processor import ProcessedItem
from mini_engine.media.settings import max_prompt_tokens
from mini_engine.messages import FoundMedia, NamedMedia
from mini_engine.prompt.renderer import collect_media
from mini_engine.protocol.api_errors import ApiError, bad_request
from mini_engine.protocol.bodies import GenerationRequest
from mini_engine.protocol.parts import MediaRef

OPEN = "a `uuid` alone needs a `cache_salt` or an API key, since other clients may use the same; or send the data"
NOT_FOUND = "this server does not have what this `uuid` names, or not with these settings; send the data"
AMBIGUOUS = "this `uuid` names another content before in this request; a name has one content"

FRAMES = "data:video/jpeg;"  # begins the URL of a video that is sent as its frames
FoundByHash = dict[bytes, FoundMedia]


# --- names ------------------------------------------------------------------------------------------------------------


async def resolve_names(context: AppContext, body: GenerationRequest, state: RequestState) -> list[MediaRef]:
    """The media of a conversation, with names resolved. An item with a `uuid` has a key. Where it repeats one of this
    request, by the `uuid` alone or with the same URL, it has that one's URL, and is that one if the settings are the
    same. Otherwise see `_resolve_name`.

    Raises ApiError: 400 for too many items, and for a name alone that other clients may use; EngineError.
    """
    client = state.name_scope
    refs = [
        replace(ref, key=name_key(ref.uuid, ref.modality, body.cache_salt, client)) if ref.uuid else ref
        for ref in collect_media(body.parts, context.config.item_limits)
    ]
    named: dict[bytes, NamedMedia] = {}
    if keys := [*{ref.key for ref in refs if ref.key and download_url_of(ref.url) == ref.url}]:
        home = context.engines.preferred(keys[0][:HASH_BYTES])  # of all names of a client
        named = await home.media_store.resolve_names(state.request_id, keys)
    resolved: list[MediaRef] = []
    sent: dict[bytes, MediaRef] = {}  # the first with data or a URL, by key
    for ref in refs:
        first, url = sent.get(ref.key), download_url_of(ref.url)
        if first and (not ref.url or (url and url == download_url_of(first.url))):
            ref = first if ref.settings == first.settings else replace(ref, url=first.url)
        elif ref.key and not (ref.url or client or body.cache_salt):
            raise bad_request(f"{ref.name}: {OPEN}.", "cache_salt", "missing_required_parameter")
        elif ref.key:
            is_alone, ref = not ref.url, _resolve_name(ref, named.get(ref.key))
            if not is_alone:
                sent.setdefault(ref.key, ref)
        resolved.append(ref)
    return resolved


def _resolve_name(ref: MediaRef, meaning: NamedMedia | None) -> MediaRef:
    """With the `ContentUrl` that its name means in place of the URL, where there is none, or where that URL was
    downloaded under the name before. No engine has the content of a name without a meaning: see `find_media`."""
    meaning = meaning or NamedMedia(ref.key, is_frames=True)
    url = download_url_of(ref.url)
    if ref.url and not (url == ref.url and meaning.url == content_digest(url.encode())):
        return ref
    return replace(ref, url=ContentUrl.of(replace(ref, url=FRAMES) if meaning.is_frames else ref, meaning.digest))


def bind_names(engines: EngineClient, items: Sequence[FetchedItem], processed: Mapping[bytes, ProcessedItem]) -> None:
    """From now on the names of these items mean them. The items are `processed`, or the engine has them; a video of
    which a part is missing gets no name. Raises EngineError."""
    for item in items:
        ref, content = item.ref, item.content
        is_whole = item.media_hash not in processed or processed[item.media_hash].missing is None
        if ref.key and is_whole and not content.is_absent:
            url = content_digest(download_url_of(content).encode())
            media = NamedMedia(content.digest, url, content.frames is not None)
            engines.preferred(ref.key[:HASH_BYTES]).media_store.bind_name(ref.key, media)


# --- what an engine has -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class DownloadAgain(Exception):
    """The engine does not have what some URLs were downloaded as. Load `refs`: there these are URLs again, and so are
    all with the same name, since no part may mean what was downloaded before and another what is there now."""

    refs: list[MediaRef]


async def find_media(
    engine: EngineHandle, items: Sequence[Candidates], request_id: str
) -> tuple[list[FetchedItem], FoundByHash]:
    """Ask `engine`, which is to get the request, what it has. Returns each item with the settings that it is used with,
    and what the engine knows, by media hash.

    Raises DownloadAgain; ApiError: 404 for names alone of what it does not have, 400 for two contents under one name;
    EngineError: the engine is down.
    """
    found = await engine.media_store.look_up(request_id, (each.media_hash for item in items for each in item))
    chosen = _choose(items, found)
    if lacking := [*dict.fromkeys(item for item in chosen if item.content.is_absent and not _is_held(item, found))]:
        if unknown := [item.ref.name for item in lacking if not download_url_of(item.content)]:
            raise ApiError(404, f"{', '.join(unknown)}: {NOT_FOUND}.", code="media_not_found", param="messages")
        keys, refs = {item.ref.key for item in lacking}, [item.ref for item in chosen]
        fetched = [replace(ref, url=download_url_of(ref.url) or ref.url) if ref.key in keys else ref for ref in refs]
        raise DownloadAgain(fetched)
    digests: dict[bytes, bytes] = {}
    for item in chosen:
        if item.ref.key and digests.setdefault(item.ref.key, item.content.digest) != item.content.digest:
            raise bad_request(f"{item.ref.name}: {AMBIGUOUS}.", "messages")
    # Only now: after a download the same items are looked up again.
    distinct = {item.media_hash: item for item in chosen}
    engine.media_store.queries.inc(len(distinct))
    engine.media_store.hits.inc(sum(_is_held(item, found) for item in distinct.values()))
    return chosen, found


def items_to_decode(items: Sequence[FetchedItem], found: FoundByHash, trusts_embeddings: bool) -> list[FetchedItem]:
    """Those that the engine has neither patches nor embeddings of. Without `trusts_embeddings` also those with
    embeddings alone, which may be evicted each time; but not those known by name, which have no data to decode."""
    return [
        item
        for item in items
        if not _is_held(item, found)
        or not (trusts_embeddings or item.content.is_absent or found[item.media_hash].held == "patches")
    ]


def _is_held(item: FetchedItem, found: FoundByHash) -> bool:
    return item.media_hash in found and found[item.media_hash].held != "facts"


def _choose(items: Sequence[Candidates], found: FoundByHash) -> list[FetchedItem]:
    """The largest of each item if it is known to leave room for the text; unless only the fitted one is held."""
    chosen = []
    for largest, fitted in items:
        known, budget = found.get(largest.media_hash), fitted.settings.video_tokens or 0
        fits = known is not None and max_prompt_tokens(known.facts) <= budget
        chosen.append(largest if fits and (_is_held(largest, found) or not _is_held(fitted, found)) else fitted)
    return chosen
