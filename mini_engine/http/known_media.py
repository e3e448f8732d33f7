"""What the engines have of a request's media: with which settings an item is used, and patches of another engine.

A request goes to the engine that it would go to with all data, and looks its media up there. What other engines have
matters only for names: their patches are copied, since the data are absent. Such a copy takes as long as two memcpys.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from mini_engine.engine_client.engines import EngineClient, EngineHandle
from mini_engine.media.loader import Candidates, FetchedItem
from mini_engine.media.processor import ProcessedItem
from mini_engine.media.settings import prompt_tokens
from mini_engine.messages import FoundMedia


class HeldElsewhere(Exception):
    """The patches of what a request names cannot all be copied, but `engine` has the rest: send the request there."""

    def __init__(self, engine: EngineHandle):
        super().__init__()
        self.engine = engine


@dataclass(frozen=True)
class KnownMedia:
    """The items of a request, and what is known of them, by media hash."""

    items: list[FetchedItem]  # each with the settings that it is used with
    found: Mapping[bytes, FoundMedia]  # in the engine that gets the request
    held: Mapping[bytes, str]  # "patches" or, where these are enough, "embeddings": need not be decoded
    copies: Mapping[bytes, ProcessedItem]  # of the patches that other engines hold


async def find_media(
    engines: EngineClient, engine: EngineHandle, items: Sequence[Candidates], request_id: str, trusts_embeddings: bool
) -> KnownMedia:
    """Ask `engine`, which is to get the request, what it has, and the others for what it lacks of what names mean.
    Without `trusts_embeddings` data are sent, whatever embeddings it has, since these may be evicted each time; names
    still mean embeddings, which another request has encoded since. Raises HeldElsewhere; EngineError: the engine is
    down."""
    hashes = [tuple(candidate.media_hash for candidate in item) for item in items]
    found = await engine.media.look_up(request_id, hashes)
    held = _held(found)
    if not trusts_embeddings:
        data = {candidate.media_hash for item in items for candidate in item if not item[0].ref.named}
        held = {media_hash: how for media_hash, how in held.items() if how == "patches" or media_hash not in data}
    chosen = _choose(items, found, held)
    lacks = [item for item, used in zip(items, chosen, strict=True) if used.ref.named and used.media_hash not in held]
    if not lacks:
        return KnownMedia(chosen, found, held, {})
    lacking = {candidate.media_hash for item in lacks for candidate in item}
    named = [item for item in items if item[0].ref.named]
    async with _asking_others(engines, engine, request_id, named) as others:
        stored = {
            media_hash: (other, media)
            for other, known in others.items()
            for media_hash, media in known.items()
            if media.patches is not None and media_hash in lacking
        }
        with_copies = {media_hash: media for media_hash, (_, media) in stored.items()}
        chosen = _choose(items, {**found, **with_copies}, {**held, **_held(with_copies)})
        absent = {item.media_hash for item in chosen if item.ref.named} - held.keys()
        if not absent <= stored.keys():
            readable = {
                media_hash: media
                for known in (found, *others.values())
                for media_hash, media in known.items()
                if media.patches is not None
            }
            for other, known in others.items():
                there = {**_held(readable), **_held(known)}
                if all(item.media_hash in there for item in _choose(named, {**readable, **known}, there)):
                    raise HeldElsewhere(other)
        copied = [stored[media_hash] for media_hash in absent & stored.keys()]
        patches = await asyncio.gather(*(other.media.read(media) for other, media in copied))
    facts = [media.facts for _, media in copied]
    copies = {known.media_hash: ProcessedItem.of(known, copy) for known, copy in zip(facts, patches, strict=True)}
    return KnownMedia(chosen, found, {**held, **dict.fromkeys(copies, "patches")}, copies)


def _held(found: Mapping[bytes, FoundMedia]) -> dict[bytes, str]:
    return {media_hash: media.held for media_hash, media in found.items() if media.held != "facts"}


def _choose(
    items: Sequence[Candidates], found: Mapping[bytes, FoundMedia], held: Mapping[bytes, str]
) -> list[FetchedItem]:
    """Each item with the settings as if there was no text, if it is known to leave room for it; unless only the smaller
    one is held."""
    chosen = []
    for first, last in ((item[0], item[-1]) for item in items):
        known, budget = found.get(first.media_hash), last.settings.video_tokens or 0
        fits = known is not None and prompt_tokens(known.facts) <= budget
        chosen.append(first if fits and (first.media_hash in held or last.media_hash not in held) else last)
    return chosen


@contextlib.asynccontextmanager
async def _asking_others(
    engines: EngineClient, engine: EngineHandle, request_id: str, items: Sequence[Candidates]
) -> AsyncIterator[dict[EngineHandle, dict[bytes, FoundMedia]]]:
    """What each running engine but `engine` knows of these. In this block the request refers there to those with
    patches."""
    hashes = dict.fromkeys(candidate.media_hash for item in items for candidate in item)
    others = [other for other in engines.engines if other is not engine and other.stopped is None]
    try:
        asked = (other.media.find(request_id, hashes) for other in others)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        yield {other: found for other, found in zip(others, answers, strict=True) if isinstance(found, dict)}
    finally:
        for other in others:
            other.media.release_aborted(request_id)
