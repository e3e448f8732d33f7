"""`MediaFacts` within its bytes."""

from __future__ import annotations

from mini_engine.core.caches.media_facts import MediaFacts
from mini_engine.messages import CachedMedia


def video(number: int, characters: int) -> CachedMedia:
    return CachedMedia(bytes([number]) * 16, "video", 4, (1, 4, 4), 0.5, "x" * characters, [0.5] * 8)


def test_facts_that_were_used_last_stay_within_the_bytes() -> None:
    facts = MediaFacts(capacity=10_000)
    first, second, third, large = video(1, 4000), video(2, 4000), video(3, 4000), video(4, 8000)
    facts.add(first)
    facts.add(second)
    assert facts.get(first.media_hash) is first
    facts.add(third)
    assert facts.get(second.media_hash) is None
    assert (facts.get(first.media_hash), facts.get(third.media_hash)) == (first, third)
    facts.add(large)
    assert len(facts) == 1 and 8000 < facts.num_bytes <= 10_000
    facts.clear()
    assert (facts.get(large.media_hash), facts.num_bytes) == (None, 0)
