"""`Recent`: what stays."""

from mini_engine.core.caches.lru import Recent


def test_what_was_used_last_is_kept_within_the_capacity() -> None:
    recent = Recent[str, str](6, len)
    for key in "abc":
        recent.put(key, "xx")
    assert recent.get("a") == "xx"
    recent.put("d", "xxx")
    assert [recent.get(key) for key in "abcd"] == ["xx", None, None, "xxx"] and (len(recent), recent.size) == (2, 5)
    recent.put("a", "xxxx")
    assert [recent.get(key) for key in "ad"] == ["xxxx", None] and recent.size == 4, "a value replaces another"
    recent.put("e", "xxxxxxx")
    assert (len(recent), recent.size) == (0, 0), "too large by itself"
    recent.put("a", "x")
    recent.clear()
    assert recent.get("a") is None and recent.size == 0
