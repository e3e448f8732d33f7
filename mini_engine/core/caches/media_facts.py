"""The facts of media items, longer than their patches and embeddings are cached. Knows nothing of requests."""

from collections import OrderedDict

from mini_engine.messages import CachedMedia

FACTS_BYTES = 64 << 20


class MediaFacts:
    """The facts of the items that requests have used last, in about `capacity` bytes."""

    def __init__(self, capacity: int = FACTS_BYTES):
        self.capacity = capacity
        self.num_bytes = 0
        self._facts: OrderedDict[bytes, CachedMedia] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, media_hash: bytes) -> CachedMedia | None:
        """None: forgotten, or never known."""
        facts = self._facts.get(media_hash)
        if facts is not None:
            self._facts.move_to_end(media_hash)
        return facts

    def add(self, facts: CachedMedia) -> None:
        """Of an item that is not known."""
        self._facts[facts.media_hash] = facts
        self.num_bytes += _nbytes(facts)
        while self.num_bytes > self.capacity:
            _, oldest = self._facts.popitem(last=False)
            self.num_bytes -= _nbytes(oldest)

    def clear(self) -> None:
        self._facts.clear()
        self.num_bytes = 0


def _nbytes(facts: CachedMedia) -> int:
    """About what they take: a video's text may have 20,000 characters, of its 768 timestamps each takes 32 bytes."""
    return 512 + len(facts.placeholder or "") + 32 * len(facts.timestamps or ())
