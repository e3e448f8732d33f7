"""Stop strings in a text that arrives in pieces."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mini_engine.prompt.stop_strings import StopSearch, StopStrings


@given(
    pieces=st.lists(st.tuples(st.text("ab", max_size=6), st.booleans()), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=6) | st.text("abc", min_size=1, max_size=3), max_size=5),
    include=st.booleans(),
)
@example([("baba", True), ("b", False)], ["ababb", "bab", "ab", "b"], False)
def test_first_stop_string_is_found_and_no_more_is_held_back_than_may_become_one(
    pieces: list[tuple[str, bool]], stops: list[str], include: bool
) -> None:
    def expected() -> tuple[str, bool]:
        """What may be sent of the text so far, and whether it is stopped, found naively."""
        for end in range(1, len(text) + 1):
            lengths = [len(stop) for stop in stops if text[:end].endswith(stop) and not exempt[end - 1]]
            if lengths:
                return text[: end if include else end - max(lengths)], True
        starts = [stop[:count] for stop in stops for count in range(len(stop))]
        return text[: len(text) - max((len(start) for start in starts if text.endswith(start)), default=0)], False

    search = StopSearch(StopStrings(tuple(stops)), include)
    text, sent, exempt = "", "", list[bool]()
    for piece, is_exempt in pieces:
        text, exempt = text + piece, exempt + [is_exempt] * len(piece)
        sent += search.push(piece, exempt=is_exempt)
        assert (sent, search.found) == expected()
        if search.found:
            return
    assert sent + search.push("", last=True) == text


@pytest.mark.parametrize(
    "stops",
    [
        ["é" * 1023 + chr(97 + number) for number in range(16)],
        ["é" * (1023 - number) + "x" for number in range(16)],
        [("é" * number + "x") * (1023 // (number + 1)) + "y" for number in range(16)],
    ],
)
@pytest.mark.parametrize("is_exempt", [False, True])
def test_work_is_linear_in_the_text(stops: list[str], is_exempt: bool) -> None:
    class Counting(list[dict[str, int]]):
        """Counts the nodes that are looked at."""

        count = 0

        def __getitem__(self, index: Any) -> Any:
            self.count += 1
            return super().__getitem__(index)

    strings = StopStrings(tuple(stops))
    nodes = strings._children = Counting(strings._children)
    search, text = StopSearch(strings), (stops[0][:-1] + "é") * 8
    for character in text:
        search.push(character, is_exempt)
    assert len(text) < nodes.count < 4 * len(text)
