"""`MediaNames` against a model: a dictionary in the order of use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.core.caches import media_names
from mini_engine.core.caches.media_names import MediaNames
from mini_engine.messages import BindName, ControlReply, ControlRequest, NamedMedia, NamesResolved, ResolveNames
from tests.support.simulated_core import OTHER, World

ROOM = 4
KEYS = st.integers(0, 2 * ROOM).map(lambda number: bytes([number]))
ACTIONS = st.one_of(
    st.lists(KEYS, min_size=1),  # resolve
    st.tuples(KEYS, st.builds(NamedMedia, KEYS)),  # bind
    st.none(),  # reset
)


@given(st.lists(ACTIONS))
def test_the_names_that_were_used_last_are_kept(actions: list[list[bytes] | tuple[bytes, NamedMedia] | None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media_names, "MAX_NAMES", ROOM)
        names, model = MediaNames(), dict[bytes, NamedMedia]()
        for action in actions:
            if action is None:
                names.reset()
                model.clear()
                continue
            if isinstance(action, tuple):
                known = dict([action])
                names.bind(*action)
            else:
                known = {key: model[key] for key in action if key in model}
                assert names.resolve("r", action).named == known
            model = {key: media for key, media in model.items() if key not in known} | known
            model = dict([*model.items()][-ROOM:])
        assert names.resolve("r", [*model, b"unknown"]).named == model
        assert len(names._named) == len(model)


def test_one_api_server_binds_and_another_resolves_until_the_caches_are_reset() -> None:
    world, media = World(), NamedMedia(b"content")
    world.receive(BindName(b"key", media))
    assert world.reply(NamesResolved, ResolveNames("r", [b"key", b"none"]), OTHER).named == {b"key": media}
    world.reply(ControlReply, ControlRequest(1, "reset_caches"))
    assert not world.reply(NamesResolved, ResolveNames("r", [b"key"]), OTHER).named
