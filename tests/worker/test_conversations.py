"""Engine core and runner together: an answer that begins with cached blocks and a snapshot is that of a cold engine."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import NewRequest, PoolingParams, SamplingParams
from mini_engine.model.config import ModelConfig
from tests.support import tiny
from tests.support.families import IMAGE, VIDEO
from tests.support.simulated_core import World

FAMILY = "qwen3_5"
Pieces = list[int | tuple[int, ...]]  # see `tiny.make_request`


class Engine:
    """An engine core whose rank computes; blocks of four tokens."""

    def __init__(self, make_runner: Callable, config: ModelConfig, **more: object) -> None:
        self.media = tiny.MemoryMedia()
        self.world = World(blocks=150, max_seqs=2, max_tokens=64, model=config, snapshots=14, **more)
        runner = make_runner(self.media, block_size=4, num_blocks=150)
        self.world.links._execute = runner.execute

    def ask(self, name: str, pieces: Pieces, pooling: PoolingParams | None = None) -> list[int]:
        new = tiny.make_request(self.media, "v", pieces, FAMILY)  # of one name, whose items are always the same
        sampling = SamplingParams(max_tokens=1 if pooling else 4, seed=0, temperature=0.0)
        self.world.receive(NewRequest(name, new.prompt_token_ids, sampling, new.media, pooling=pooling))
        for item in new.media:
            self.world.media_ready(item.patches.message)
        self.world.run()
        return self.world.tokens[name]


@pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session")
def test_answers_of_conversations_that_share_fork_and_truncate_prefixes_are_those_of_a_cold_engine(make_runner, model):
    warm, cold = Engine(make_runner, model.config), Engine(make_runner, model.config, enable_prefix_caching=False)
    added = st.lists(st.one_of(st.integers(3, 9), st.sampled_from([(4, 4, 6), (3, 6, 4)])), min_size=1, max_size=12)
    # A turn goes on from one before, or from the first part of its prompt and answer.
    turns = st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(1, 40)), added)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(turns, min_size=1, max_size=4))
    def converse(conversation: list[tuple[int, int | None, Pieces]]) -> None:
        history: list[Pieces] = [[5]]
        for number, cut, more in conversation:
            pieces, name = history[number % len(history)][:cut] + more, f"r{len(warm.world.ends)}"
            answer = warm.ask(name, pieces)
            assert answer == cold.ask(name, pieces)
            history.append(pieces + [3 if token in (IMAGE, VIDEO) else token for token in answer])

    converse()
    stats = warm.world.stats()
    assert stats.state_snapshot_hits > 60 and not cold.world.stats().state_snapshot_hits


@pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session")
def test_hidden_states_after_a_cached_prefix_are_those_of_a_cold_engine(make_runner, model):
    warm, cold = Engine(make_runner, model.config), Engine(make_runner, model.config, enable_prefix_caching=False)
    pieces = [5, (4, 4, 6), *range(3, 30)]
    for engine, stop in itertools.product((warm, cold), range(2, len(pieces) + 1)):
        assert engine.ask(f"r{stop}", pieces[:stop], PoolingParams()) == []
    for name, numbers in cold.world.pooled.items():
        np.testing.assert_allclose(
            *(np.frombuffer(each, "<f4") for each in (numbers, warm.world.pooled[name])), atol=1e-5
        )
    assert warm.world.cached.total() > 300 and not cold.world.cached.total()
