"""`Recent` against a model: a dictionary in the order of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mini_engine.recent import Recent

ROOM = 6
KEYS = st.integers(0, 8).map(lambda number: bytes([number]))
ACTIONS = st.one_of(KEYS, st.tuples(KEYS, st.text("x", min_size=1, max_size=ROOM + 1)), st.none())


@given(st.lists(ACTIONS))
def test_what_was_used_last_is_kept(actions: list[bytes | tuple[bytes, str] | None]) -> None:
    """A key is read, a tuple is put, None clears all."""
    recent, model = Recent(ROOM, len), dict[bytes, str]()
    for action in actions:
        if action is None:
            recent.clear()
            model.clear()
        elif isinstance(action, tuple):
            recent.put(*action)
            model.pop(action[0], None)
            model |= [action]
            while len("".join(model.values())) > ROOM:
                del model[next(iter(model))]
        else:
            assert recent.get(action) == model.get(action)
            if action in model:
                model[action] = model.pop(action)
        assert (len(recent), recent.size) == (len(model), len("".join(model.values())))
