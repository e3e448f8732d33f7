"""Engine core and runner together: an answer that begins with cached blocks and a snapshot is that of a cold engine."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import MediaItem, NewRequest, SamplingParams
from mini_engine.model.config import ModelConfig
from tests.core.world import World
from tests.model.families import IMAGE, VIDEO
from tests.worker import tiny

TURN_TOKENS = 4
VIDEOS = [(4, 4, 6), (3, 6, 4)]

pieces = st.one_of(
    st.lists(st.integers(3, 9), min_size=1, max_size=12),  # text
    st.sampled_from(range(len(VIDEOS))),
)
# A turn goes on from one before, or from a part of its prompt and answer.
turns = st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 80)), st.lists(pieces, min_size=1, max_size=2))


class Engine:
    """An engine core whose rank computes; blocks of four tokens."""

    def __init__(self, make_runner: Callable, config: ModelConfig, **more: object) -> None:
        self.media = tiny.MemoryMedia()
        self.world = World(block_size=4, max_seqs=2, max_tokens=64, model=config, snapshots=14, blocks=150, **more)
        runner = make_runner(self.media, block_size=4, num_blocks=150)
        self.world.links._execute = lambda step: runner.execute(step).tokens
        self.asked = 0

    def ask(self, tokens: list[int], places: list[tuple[int, int]]) -> list[int]:
        """`places`: (offset, number of the video)."""
        self.asked += 1
        items = [_shifted(self._video(number), offset) for offset, number in places]
        name = f"r{self.asked}"
        self.world.receive(NewRequest(name, tokens, SamplingParams(TURN_TOKENS, 0, temperature=0.0), items))
        for item in items:
            self.world.media_ready(item.patches.message)
        self.world.run()
        assert self.world.ends[name] == ["length"], self.world.errors
        return self.world.tokens[name]

    def _video(self, number: int) -> MediaItem:
        return tiny.make_request(self.media, f"video {number}", [VIDEOS[number]], FAMILY).media[0]


def _shifted(item: MediaItem, offset: int) -> MediaItem:
    return msgspec.structs.replace(item, offsets=[offset + each for each in item.offsets], cacheable=False)


FAMILY = "qwen3_5"


@pytest.fixture(scope="module")
def engines(make_runner, model):
    return Engine(make_runner, model.config), Engine(make_runner, model.config, enable_prefix_caching=False)


@pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session")
def test_answers_of_conversations_that_share_fork_and_truncate_prefixes_are_those_of_a_cold_engine(engines):
    warm, cold = engines

    @settings(max_examples=500, deadline=None)
    @given(st.lists(turns, min_size=1, max_size=4))
    def converse(conversation: list) -> None:
        history: list[tuple[list[int], list[tuple[int, int]]]] = [([5], [])]
        for number, cut, added in conversation:
            tokens, places = (list(part) for part in history[number % len(history)])
            if cut is not None and cut < len(tokens):
                inside = [offset for offset, video in places if offset < cut < offset + len(_tokens(video))]
                tokens = tokens[: min([cut, *inside]) or 1]
                places = [(offset, video) for offset, video in places if offset + len(_tokens(video)) <= len(tokens)]
            for piece in added:
                if isinstance(piece, list):
                    tokens += piece
                elif len(places) < 3:
                    places.append((len(tokens), piece))
                    tokens += _tokens(piece)
            answer = warm.ask(tokens, places)
            assert answer == cold.ask(tokens, places)
            history.append((tokens + [3 if token in (IMAGE, VIDEO) else token for token in answer], places))

    converse()
    stats = warm.world.stats()
    assert stats.state_snapshot_hits > 500 and not cold.world.stats().state_snapshot_hits


def _tokens(video: int) -> list[int]:
    return tiny.make_request(tiny.MemoryMedia(), f"video {video}", [VIDEOS[video]], FAMILY).prompt_token_ids
