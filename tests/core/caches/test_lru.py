"""`LruDict`: what stays."""

from mini_engine.core.caches.lru import LruDict


def test_what_was_used_last_is_kept_within_the_capacity() -> None:
    lru = LruDict[str, str](6, len)
    for key in "abc":
        lru.put(key, "xx")
    assert lru.get("a") == "xx"
    lru.put("d", "xxx")
    assert [lru.get(key) for key in "abcd"] == ["xx", None, None, "xxx"] and (len(lru), lru.size) == (2, 5)
    lru.put("a", "xxxx")
    assert [lru.get(key) for key in "ad"] == ["xxxx", None] and lru.size == 4, "a value replaces another"
    lru.put("e", "xxxxxxx")
    assert (len(lru), lru.size) == (0, 0), "too large by itself"
    lru.put("a", "x")
    lru.clear()
    assert lru.get("a") is None and lru.size == 0
