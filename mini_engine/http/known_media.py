"""Media that need not be sent, or decoded: what names mean, and what the engines have.

A name, the `uuid` of a part, means a content digest, within one API key and one `cache_salt`. All that follows,
settings, budgets and caches, is as if the content had been sent, but that its bytes are absent: if no engine has it, a
URL is fetched after all, and a name alone is an error.

A request goes to the engine that it would go to with all data, and looks its media up there. What other engines have
matters only for names: their patches are copied, which takes as long as two memcpys.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from starlette.datastructures import State

from mini_engine.engine_client.engines import EngineClient, EngineHandle
from mini_engine.http.context import AppContext
from mini_engine.media.hashing import HASH_BYTES, content_digest, name_key
from mini_engine.media.loader import Candidates, Content, FetchedItem, origin_of
from mini_engine.media.processor import ProcessedItem
from mini_engine.media.settings import prompt_tokens
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


async def resolve_names(context: AppContext, body: GenerationRequest, state: State) -> list[MediaRef]:
    """The media of a conversation, of which those with a `uuid` have a key. The `Content` that a name
    means is the URL of those that are alone, or that have the URL which was downloaded under their name before; unless
    this request has sent the name with data, or this URL, before: then it is that part again, by its `name` too if its
    settings are the same.

    Raises ApiError: 400 for too many items, and for a name alone that other clients may use; EngineError.
    """
    client = state.client if context.config.api_key else b""
    refs = [
        replace(ref, key=name_key(ref.uuid, ref.modality, body.cache_salt, client)) if ref.uuid else ref
        for ref in collect_media(body.parts, context.config.item_limits)
    ]
    named: dict[bytes, NamedMedia] = {}
    if keys := [*{ref.key for ref in refs if ref.key and origin_of(ref.url) == ref.url}]:
        home = context.engines.preferred(keys[0][:HASH_BYTES])  # of all names of a client
        named = await home.media.resolve_names(state.request_id, keys)
    resolved: list[MediaRef] = []
    sent: dict[bytes, MediaRef] = {}
    for ref in refs:
        first, origin = sent.get(ref.key), origin_of(ref.url)
        if first and (not ref.url or (origin and origin == origin_of(first.url))):
            ref = first if ref.settings == first.settings else replace(ref, url=first.url)
        elif ref.key and not (ref.url or client or body.cache_salt):
            raise bad_request(f"{ref.name}: {OPEN}.", "cache_salt", "missing_required_parameter")
        elif ref.key:
            is_alone, ref = not ref.url, _resolved(ref, named.get(ref.key))
            if not is_alone:
                sent.setdefault(ref.key, ref)
        resolved.append(ref)
    return resolved


def _resolved(ref: MediaRef, bound: NamedMedia | None) -> MediaRef:
    """`ref`, whose name is bound to this, or to nothing."""
    if not ref.url:
        bound = bound or NamedMedia(ref.key, is_frames=True)  # a digest that nothing is found by
    elif not bound or origin_of(ref.url) != ref.url or bound.url != content_digest(ref.url.encode()):
        return ref
    named = replace(ref, url=FRAMES) if bound.is_frames else ref
    return replace(ref, url=Content.of(named, bound.digest))


def bind_names(engines: EngineClient, items: Sequence[FetchedItem], processed: Mapping[bytes, ProcessedItem]) -> None:
    """The names of these mean them from now on, which are `processed`, or which the engine has; but not of a video of
    which a part is missing. Raises EngineError."""
    for item in items:
        ref, content = item.ref, item.content
        is_whole = item.media_hash not in processed or processed[item.media_hash].missing is None
        if ref.key and is_whole and not content.is_absent:
            url = content_digest(origin.encode()) if (origin := origin_of(content)) else b""
            media = NamedMedia(content.digest, url, content.frames is not None)
            engines.preferred(ref.key[:HASH_BYTES]).media.bind_name(ref.key, media)


# --- what the engines have --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class HeldElsewhere(Exception):
    """The patches of what a request names cannot all be copied, but `engine` has the rest: send the request there."""

    engine: EngineHandle


@dataclass(eq=False)
class UrlsAbsent(Exception):
    """No engine has what some URLs were downloaded as: load the request's `refs`, in which they are to be fetched. All
    URLs with the same name are: no part means what was downloaded before, and another what is there now."""

    refs: list[MediaRef]


@dataclass(frozen=True)
class KnownMedia:
    """The items of a request, and what is known of them, by media hash."""

    items: list[FetchedItem]  # each with the settings that it is used with
    found: FoundByHash  # by the engine that gets the request, which gets the `copies`, too
    copies: Mapping[bytes, ProcessedItem]  # of the patches that other engines hold

    @property
    def absent(self) -> list[FetchedItem]:
        """What has to be decoded."""
        return [item for item in self.items if not _is_held(item, self.found)]


async def find_media(
    engines: EngineClient, engine: EngineHandle, items: Sequence[Candidates], request_id: str, trusts_embeddings: bool
) -> KnownMedia:
    """Ask `engine`, which is to get the request, what it has, and the others if it lacks any of what names mean.
    Without `trusts_embeddings` data are sent, whatever embeddings it has, since these may be evicted each time; names
    still mean embeddings, which another request has encoded since.

    Raises HeldElsewhere, UrlsAbsent; ApiError: 404 for names alone of what no engine has, 400 for two contents under
    one name; EngineError: the engine is down.
    """
    found = await engine.media.look_up(request_id, [[each.media_hash for each in item] for item in items])
    if not trusts_embeddings:
        named = {each.media_hash for item in items for each in item if each.content.is_absent}
        for media_hash, media in found.items():
            if media.held == "embeddings" and media_hash not in named:
                found[media_hash] = msgspec.structs.replace(media, held="facts")
    known = KnownMedia(_choose(items, found), found, {})
    if any(item.content.is_absent for item in known.absent):
        known = await _copy_from_others(engines, engine, items, request_id, found)
    digests: dict[bytes, bytes] = {}
    for item in known.items:
        if item.ref.key and digests.setdefault(item.ref.key, item.content.digest) != item.content.digest:
            raise bad_request(f"{item.name}: {AMBIGUOUS}.", "messages")
    return known


async def _copy_from_others(
    engines: EngineClient, engine: EngineHandle, items: Sequence[Candidates], request_id: str, found: FoundByHash
) -> KnownMedia:
    """As `find_media`, if `engine` has found these, and that is not all of what names mean."""
    named = [item for item in items if item[0].content.is_absent]
    hashes = [[each.media_hash for each in item] for item in named]
    others = [other for other in engines.engines if other is not engine and other.stopped is None]
    try:  # in it the request refers there to items with patches
        asked = (other.media.look_up(request_id, hashes, is_counted=False) for other in others)
        answers = zip(others, await asyncio.gather(*asked, return_exceptions=True), strict=True)
        known = {engine: found} | {other: answer for other, answer in answers if isinstance(answer, dict)}
        owners = {key: other for other, answer in known.items() for key, media in answer.items() if media.patches}
        readable = {key: known[owner][key] for key, owner in owners.items()}
        usable = {  # what each has found, and what is readable in the place of facts
            other: readable | {key: each for key, each in answer.items() if each.held != "facts" or key not in readable}
            for other, answer in known.items()
        }
        complete = [other for other, its in usable.items() if all(_is_held(item, its) for item in _choose(named, its))]
        here = usable[engine]
        chosen = _choose(items, here)
        if not complete:
            raise _not_found(chosen, here)
        if engine not in complete:
            raise HeldElsewhere(complete[0])
        copied = {item.media_hash for item in chosen if _is_held(item, here) and not _is_held(item, found)}
        patches = await asyncio.gather(*(owners[key].media.read(here[key]) for key in copied))
        copies = {key: ProcessedItem.of(here[key].facts, copy) for key, copy in zip(copied, patches, strict=True)}
        return KnownMedia(chosen, here, copies)
    finally:
        for other in others:
            other.media.release_aborted(request_id)


def _is_held(item: FetchedItem, found: FoundByHash) -> bool:
    return item.media_hash in found and found[item.media_hash].held != "facts"


def _choose(items: Sequence[Candidates], found: FoundByHash) -> list[FetchedItem]:
    """Each item with the settings as if there was no text, if it is known to leave room for it; unless only the smaller
    one is held."""
    chosen = []
    for first, last in ((item[0], item[-1]) for item in items):
        known, budget = found.get(first.media_hash), last.settings.video_tokens or 0
        fits = known is not None and prompt_tokens(known.facts) <= budget
        chosen.append(first if fits and (_is_held(first, found) or not _is_held(last, found)) else last)
    return chosen


def _not_found(items: Sequence[FetchedItem], found: FoundByHash) -> ApiError | UrlsAbsent:
    """The error for a request with these, of which names mean some that are not found."""
    lacking = dict.fromkeys(item for item in items if item.content.is_absent and not _is_held(item, found))
    if unknown := [item.name for item in lacking if not origin_of(item.content)]:
        return ApiError(404, f"{', '.join(unknown)}: {NOT_FOUND}.", code="media_not_found", param="messages")
    keys, refs = {item.ref.key for item in lacking}, [item.ref for item in items]
    return UrlsAbsent([replace(ref, url=origin_of(ref.url) or ref.url) if ref.key in keys else ref for ref in refs])
