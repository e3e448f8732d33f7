"""A decode batch that is carried on from step to step is the one that a plain rebuild gives, whatever happens to its
sequences in between."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.config import BUNDLED_MODEL
from mini_engine.kernels import ops
from mini_engine.messages import Chunk
from mini_engine.model.config import ModelConfig
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker.attention import sdpa as attention
from mini_engine.worker.attention.sdpa import KVCache, SdpaBackend, StepAttention, empty_blocks
from mini_engine.worker.batch import DecodeBatch, FlatBatch, SequenceState, build_batch
from tests.support import tiny

SIZE, BLOCKS = 4, 4000
NAMES = "abcdef"
VISION = ModelConfig.from_dir(BUNDLED_MODEL).vision
CACHE = KVCache(empty_blocks(AttentionShape(1, 1, 8), BLOCKS, SIZE, torch.float32, torch.device("cpu")))
CACHE.storage.normal_(generator=torch.Generator().manual_seed(0))
BACKEND = SdpaBackend(CACHE)

# What happens to one sequence in one step. "decode" is the most likely, so that batches are carried on for a while.
ACTIONS = st.sampled_from(["decode"] * 12 + ["sit out", "restart", "leave", "ahead"])
STEPS = st.lists(st.one_of(st.just({}), st.dictionaries(st.sampled_from(NAMES), ACTIONS, max_size=2)), max_size=60)


class ChunkWriter:
    """Writes chunks as the engine core would, and keeps the sequences as a rank would."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = dict(zip(NAMES, lengths, strict=False))
        self._media = tiny.MemoryMedia()
        self._fresh = iter(range(BLOCKS))
        self.sequences: dict[str, SequenceState] = {}
        self._computed: dict[str, int] = {}
        self.known: dict[str, int] = {}  # tokens

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
            self.sequences[name] = SequenceState(tiny.make_request(self._media, name, pieces), VISION, SIZE)
            self._computed[name], self.known[name] = 0, self._lengths[name]
        state = self.sequences[name]
        start = 0 if restart else self._computed[name]
        count = self.known[name] - start
        if start == 0 and count > 6:  # a prompt in two chunks
            count, samples = 6, False
        have = 0 if restart else state.num_blocks
        # "ahead": a block more than this step's token needs.
        need = -(-(start + count) // SIZE) + (action == "ahead") - have
        self._computed[name] = start + count
        return Chunk(name, start, count, [next(self._fresh) for _ in range(max(need, 0))], samples, restart)


def assert_equal(ours: FlatBatch, attend: StepAttention, other: FlatBatch, fresh: StepAttention) -> None:
    assert ours.decodes and ours.sampled == other.sampled and np.array_equal(ours.stops, other.stops)
    for name in ("token_ids", "positions", "cache_indices", "last_rows"):
        assert torch.equal(getattr(ours, name), getattr(other, name)), name
    count = len(ours.sampled)
    heads = ops.Heads(torch.randn(count, 4, 8), 1, *ops.rotary_tables(torch.randn(count, 4)))
    assert torch.equal(attend(0, heads), fresh(0, heads))


def play(lengths: list[int], steps: list[dict[str, str]]) -> int:
    """Compare in every step; returns how many were carried on."""
    core, kept, carried = ChunkWriter(lengths), None, 0
    for number, actions in enumerate(steps):
        chunks = core.step(actions)
        if "leave" in actions.values():
            kept = None
        if not chunks:
            continue
        for chunk in chunks:
            core.sequences[chunk.request_id].add_blocks(chunk)
        batch = build_batch([(chunk, core.sequences[chunk.request_id]) for chunk in chunks], SIZE)
        attend = BACKEND.step(batch.cache_indices, batch.spans)
        if kept is not None and kept.advance(chunks):
            carried += 1
            assert_equal(kept.batch, kept.attend, batch, attend)
        else:
            kept = DecodeBatch(chunks, batch, attend, BACKEND) if batch.decodes else None
        tokens = [(31 * number + 7 * i) % 190 for i in range(len(batch.sampled))]
        if kept is not None:
            kept.feed(torch.tensor(tokens))
        for state, stop, token in zip(batch.sampled, batch.stops.tolist(), tokens, strict=True):
            state.tokens[stop], core.known[state.request_id] = token, stop + 1
    return carried


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    STEPS,
    st.sampled_from([(0, 1 << 30), (1 << 30, 1 << 30), (2, 12), (1, 1 << 30)]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_batch_that_is_carried_on_is_the_one_that_is_built(lengths, steps, bounds):
    with pytest.MonkeyPatch.context() as patch:
        for name, blocks in zip(("PAD_BYTES", "GROUP_BYTES"), bounds, strict=True):
            patch.setattr(attention, name, blocks * CACHE.block_bytes)
        play(lengths, steps)


def test_an_undisturbed_batch_is_carried_on():
    """The first step computes the prompts, the second is the first of its kind."""
    assert play([5, 4, 4], [{}] * 42) == 40
