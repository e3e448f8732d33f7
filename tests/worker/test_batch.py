"""A decode batch that is carried on from step to step is the one that a plain rebuild gives, whatever happens to its
sequences in between."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import Chunk
from mini_engine.model.config import ModelConfig
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker import attention
from mini_engine.worker.attention import KVCache, SdpaBackend, StepAttention
from mini_engine.worker.batch import DecodeBatch, FlatBatch, SequenceState, build_batch
from tests.worker import tiny

SIZE, BLOCKS = 4, 4000
NAMES = "abcdef"
CACHE = KVCache.allocate(AttentionShape(1, 1, 8), BLOCKS, SIZE, torch.float32, torch.device("cpu"))
CACHE.storage.normal_(generator=torch.Generator().manual_seed(0))
BACKEND = SdpaBackend(CACHE)

# What happens to one sequence in one step. "decode" is the most likely, so that batches are carried on for a while.
ACTIONS = st.sampled_from(["decode"] * 12 + ["sit out", "restart", "leave", "ahead"])
STEPS = st.lists(st.one_of(st.just({}), st.dictionaries(st.sampled_from(NAMES), ACTIONS, max_size=2)), max_size=60)


@pytest.fixture(scope="module")
def config(checkpoint) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((checkpoint / "config.json").read_text()))


def test_blocks_left_unwritten_are_named(config):
    state = SequenceState(tiny.make_request(tiny.MemoryMedia(), "text", list(range(60))), config)

    def take(start: int, count: int, blocks: list[int], restart: bool = False) -> list[int]:
        return state.take_blocks(Chunk("text", start, count, blocks, False, restart), 16)

    assert take(0, 32, [9, 8, 7]) == [7]
    assert take(32, 8, []) == []
    assert take(40, 9, [5]) == [5]
    assert state.blocks.array.tolist() == [9, 8, 7, 5]
    assert take(0, 20, [1, 2], restart=True) == [2]
    # Blocks 3 and 4 hold 32 tokens that another sequence computed, and 6 the first of this chunk's.
    assert take(32, 10, [3, 4, 6], restart=True) == [6]
    assert take(40, 8, [3, 4, 6], restart=True) == []
    assert take(0, 1, [], restart=True) == [] and len(state.blocks) == 0


class Core:
    """Writes chunks as the engine core would, and keeps the sequences as a rank would."""

    def __init__(self, config: ModelConfig, lengths: list[int]) -> None:
        self._config, self._lengths = config, dict(zip(NAMES, lengths, strict=False))
        self._media = tiny.MemoryMedia()
        self._fresh = iter(range(BLOCKS))
        self.sequences: dict[str, SequenceState] = {}
        self._computed: dict[str, int] = {}

    def step(self, actions: dict[str, str]) -> list[Chunk]:
        chunks = [self._chunk(name, actions.get(name, "decode")) for name in self._lengths]
        return [chunk for chunk in chunks if chunk is not None]

    def _chunk(self, name: str, action: str) -> Chunk | None:
        if action == "leave":
            self.sequences.pop(name, None)
        if action in ("leave", "sit out"):
            return None
        restart, samples = action == "restart", True
        if name not in self.sequences:
            pieces = list(range(3, 3 + self._lengths[name]))
            self.sequences[name] = SequenceState(tiny.make_request(self._media, name, pieces), self._config)
            self._computed[name] = 0
        state = self.sequences[name]
        start = 0 if restart else self._computed[name]
        count = len(state.tokens) - start
        if start == 0 and count > 6:  # a prompt in two chunks
            count, samples = 6, False
        have = 0 if restart else len(state.blocks)
        # "ahead": a block more than this step's token needs.
        need = -(-(start + count) // SIZE) + (action == "ahead") - have
        self._computed[name] = start + count
        return Chunk(name, start, count, [next(self._fresh) for _ in range(max(need, 0))], samples, restart)


def assert_equal(ours: FlatBatch, attend: StepAttention, other: FlatBatch, fresh: StepAttention) -> None:
    assert ours.decodes and ours.sampled == other.sampled and np.array_equal(ours.stops, other.stops)
    for name in ("token_ids", "positions", "slots", "last_rows"):
        assert torch.equal(getattr(ours, name), getattr(other, name)), name
    q, k, v = torch.randn(len(ours.sampled), 4, 8).split((2, 1, 1), dim=1)
    assert torch.equal(attend(0, q, k, v), fresh(0, q, k, v))


def play(config: ModelConfig, lengths: list[int], steps: list[dict[str, str]]) -> int:
    """Compare in every step; returns how many were carried on."""
    core, kept, carried = Core(config, lengths), None, 0
    for number, actions in enumerate(steps):
        chunks = core.step(actions)
        if "leave" in actions.values():
            kept = None
        if not chunks:
            continue
        for chunk in chunks:
            core.sequences[chunk.request_id].take_blocks(chunk, SIZE)
        batch, spans = build_batch([(chunk, core.sequences[chunk.request_id]) for chunk in chunks], SIZE)
        attend = BACKEND.step(batch.slots, spans)
        if kept is not None and kept.advance(chunks):
            carried += 1
            assert_equal(kept.batch, kept.attend, batch, attend)
        else:
            kept = DecodeBatch(chunks, batch, attend, BACKEND) if batch.decodes else None
        tokens = [(31 * number + 7 * i) % 190 for i in range(len(batch.sampled))]
        if kept is not None:
            kept.feed(torch.tensor(tokens))
        for state, stop, token in zip(batch.sampled, batch.stops.tolist(), tokens, strict=True):
            state.tokens.put(stop, token)
    return carried


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    STEPS,
    st.sampled_from([(0, 1 << 30), (1 << 30, 1 << 30), (2, 12), (1, 1 << 30)]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_batch_that_is_carried_on_is_the_one_that_is_built(config, lengths, steps, bounds):
    with pytest.MonkeyPatch.context() as patch:
        for name, blocks in zip(("PAD_BYTES", "GROUP_BYTES"), bounds, strict=True):
            patch.setattr(attention, name, blocks * CACHE.block_bytes)
        play(config, lengths, steps)


def test_an_undisturbed_batch_is_carried_on(config):
    """The first step computes the prompts, the second is the first of its kind."""
    assert play(config, [5, 4, 4], [{}] * 42) == 40
