"""This API server's copy of an engine's directory: which media its ranks keep, as far as this server has heard.

The copy may be behind: an item that it holds may be gone from the ranks when a request that names it arrives. Then the
engine answers `MediaMiss`, and the request is sent again with the tensor. Knows nothing of requests or sockets; used
from the event-loop thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mini_engine import metrics
from mini_engine.messages import CachedMedia


class MediaCopy:
    """One engine's kept media by hash. One that is not `enabled` stays empty and counts nothing."""

    def __init__(self, engine: int, enabled: bool):
        self._enabled = enabled
        self._items: dict[bytes, CachedMedia] = {}
        self._queries = metrics.mm_cache_queries_total.labels(str(engine))
        self._hits = metrics.mm_cache_hits_total.labels(str(engine))

    def __len__(self) -> int:
        return len(self._items)

    def add(self, items: Iterable[CachedMedia]) -> None:
        """All ranks of the engine keep these."""
        if self._enabled:
            self._items |= {item.media_hash: item for item in items}

    def drop(self, hashes: Iterable[bytes]) -> None:
        """The ranks keep these no more. Unknown ones are ignored: an eviction and a miss may tell of the same item."""
        for media_hash in hashes:
            self._items.pop(media_hash, None)

    def clear(self) -> None:
        """The engine is gone, and all it kept."""
        self._items.clear()

    def holds_all(self, hashes: Collection[bytes]) -> bool:
        """Whether none of `hashes` need be processed for this engine. False for none: nothing speaks for it then."""
        return bool(hashes) and all(media_hash in self._items for media_hash in hashes)

    def look_up(self, hashes: Collection[bytes]) -> dict[bytes, CachedMedia]:
        """Those of `hashes` that the engine keeps; each of `hashes` counts as a query, and as a hit where found."""
        if not self._enabled:
            return {}
        found = [media_hash for media_hash in hashes if media_hash in self._items]
        self._queries.inc(len(hashes))
        self._hits.inc(len(found))
        return {media_hash: self._items[media_hash] for media_hash in found}
