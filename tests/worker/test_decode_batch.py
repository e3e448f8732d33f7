"""A decode batch that is carried on from step to step is the one that a plain rebuild gives."""

import json
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import Chunk, Step
from mini_engine.model.config import ModelConfig
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker import paged_attention
from mini_engine.worker.batch import FlatBatch, build_batch
from mini_engine.worker.decode_batch import MOST_TAKEN, DecodeBatch
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.paged_attention import PagedAttention, SdpaBackend
from mini_engine.worker.sequences import SequenceState
from tests.worker import script, tiny
from tests.worker.conftest import NUM_BLOCKS

SIZE, CPU = 4, torch.device("cpu")
NAMES = "abcdef"
CACHE = KVCache.allocate(AttentionShape(1, 1, 8), 1, SIZE, torch.float32, CPU)
BACKEND = SdpaBackend(CACHE)

# What happens to one sequence in one step. "decode" is the most likely, so that batches are carried on for a while.
ACTIONS = st.sampled_from(["decode"] * 12 + ["sit out", "restart", "leave", "ahead"])
STEPS = st.lists(st.one_of(st.just({}), st.dictionaries(st.sampled_from(NAMES), ACTIONS, max_size=2)), max_size=60)


class Core:
    """Writes chunks as the engine core would, and keeps the sequences as a rank would."""

    def __init__(self, config: ModelConfig, lengths: list[int]) -> None:
        self._config, self._lengths = config, dict(zip(NAMES, lengths, strict=False))
        self._media = tiny.MemoryMedia()
        self._fresh = iter(range(10**9))
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
        known = len(state.tokens)
        start = 0 if restart else self._computed[name]
        count = known - start
        if start == 0 and count > 6:  # a prompt in two chunks
            count, samples = 6, False
        have = 0 if restart else len(state.blocks)
        # "ahead": a block more than this step's token needs.
        need = -(-(start + count) // SIZE) + (action == "ahead") - have
        self._computed[name] = start + count
        return Chunk(name, start, count, [next(self._fresh) for _ in range(max(need, 0))], samples, restart)


def assert_equal(ours: DecodeBatch, batch: FlatBatch, attend: PagedAttention) -> None:
    assert not ours.batch.in_prompt
    assert not batch.in_prompt
    assert ours.batch.sampled == batch.sampled
    assert ours.batch.greedy == batch.greedy
    assert np.array_equal(ours.batch.stops, batch.stops)
    for name in ("token_ids", "positions", "slots", "last_rows"):
        assert torch.equal(getattr(ours.batch, name), getattr(batch, name)), name
    assert torch.equal(ours.attend._slots, attend._slots)
    assert ours.attend._prefills == attend._prefills == []
    for mine, other in zip(ours.attend._groups, attend._groups, strict=True):
        assert (mine.rows, mine._length) == (other.rows, other._length)
        assert torch.equal(mine._table, other._table)
        assert (mine._mask is None) == (other._mask is None)
        assert mine._mask is None or torch.equal(mine._mask, other._mask)


def play(config: ModelConfig, lengths: list[int], steps: list[dict[str, str]], backend: SdpaBackend = BACKEND) -> int:
    """Compare in every step; returns how many were carried on. Batches that are carried on use `backend`."""
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
            assert_equal(kept, batch, attend)
        else:
            kept = DecodeBatch(chunks, batch, attend, backend) if batch.decodes else None
        tokens = [(31 * number + 7 * i) % 190 for i in range(len(batch.sampled))]
        if kept is not None:
            kept.feed(torch.tensor(tokens))
            kept.take(tokens)
            kept.settle()
        else:
            for state, stop, token in zip(batch.sampled, batch.stops.tolist(), tokens, strict=True):
                state.tokens.put(stop, token)
    return carried


@pytest.fixture(scope="module")
def config(checkpoint) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((checkpoint / "config.json").read_text()))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    STEPS,
    st.sampled_from([(0, 1 << 30), (1 << 30, 1 << 30), (2, 12), (1, 1 << 30)]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_carried_on_is_built_anew(config, lengths, steps, bounds):
    with pytest.MonkeyPatch.context() as patch:
        for name, blocks in zip(("PAD_BYTES", "GROUP_BYTES"), bounds, strict=True):
            patch.setattr(paged_attention, name, blocks * CACHE.block_bytes)
        play(config, lengths, steps)


def test_an_undisturbed_batch_is_never_built_anew(config):
    # The first step computes the prompts, the second is the first of its kind.
    assert play(config, [5, 3, 2], [{}] * 42) == 40


@pytest.mark.parametrize(("most", "made_anew"), [(1 << 30, 0), (12, 3)])
def test_attention_is_made_anew_only_when_the_groups_change(most, made_anew, config, monkeypatch):
    """Three rows stay one group; or they are in groups of 3, of 2 and 1, of 1 and 2, and at last of one each."""
    made = []

    class Noting(SdpaBackend):
        def step(self, *arguments) -> PagedAttention:
            made.append(arguments)
            return super().step(*arguments)

    monkeypatch.setattr(paged_attention, "GROUP_BYTES", most * CACHE.block_bytes)
    play(config, [5, 4, 4], [{}] * 42, Noting(CACHE))
    assert len(made) == made_anew


def test_the_sequences_get_what_was_taken(config):
    """Without `settle` once there is much of it. One has a later token, from before a restart, which goes."""
    core = Core(config, [4])
    core.step({})
    state = core.sequences["a"]
    state.tokens.extend_at(4, [7, 8, 9])
    state.blocks.extend_at(0, range(40))
    chunks = [Chunk("a", 4 + i, 1, [], True) for i in range(MOST_TAKEN + 6)]
    batch, spans = build_batch([(chunks[0], state)], SIZE)
    ours = DecodeBatch(chunks[:1], batch, BACKEND.step(batch.slots, spans), BACKEND)
    for i, chunk in enumerate(chunks):
        assert i == 0 or ours.advance([chunk])
        ours.feed(torch.tensor([i]))
        ours.take([i])
    assert state.tokens.array[4:].tolist() == [7, *range(MOST_TAKEN)]
    for _ in range(2):
        ours.settle()
        assert state.tokens.array[4:].tolist() == [7, *range(len(chunks))]


@pytest.mark.parametrize(
    "change",
    [{"request_id": "b"}, {"start": 6}, {"start": 4}, {"num_tokens": 2}, {"samples": False}, {"restart": True}],
    ids=str,
)
def test_what_does_not_follow(config, change):
    core = Core(config, [4])
    for _ in range(2):
        chunks = core.step({})
        state = core.sequences["a"]
        state.take_blocks(chunks[0], SIZE)
        batch, spans = build_batch([(chunks[0], state)], SIZE)
        state.tokens.put(int(batch.stops[0]), 9)
    follow = {"request_id": "a", "start": 5, "num_tokens": 1, "block_ids": [], "samples": True, "restart": False}
    make: Callable[[], DecodeBatch] = partial(DecodeBatch, chunks, batch, BACKEND.step(batch.slots, spans), BACKEND)
    assert chunks[0].start == 4
    assert not make().advance([Chunk(**(follow | change))])
    assert not make().advance([])
    assert make().advance([Chunk(**follow)])


def test_a_finished_sequence_is_not_kept_by_the_batch(make_runner, monkeypatch):
    """And one that takes its name is another."""
    media = tiny.MemoryMedia()
    first, second = (tiny.make_request(media, "r", pieces) for pieces in ([1, 2, 3], [30, 20, 10]))

    def run(runner: ModelRunner) -> list[int]:
        tokens = []
        for new, finished in ((first, []), (second, ["r"])):
            steps = [Step(1, finished=finished, started=[new], chunks=[Chunk("r", 0, 3, [0], True)])]
            steps += [Step(2 + i, chunks=[Chunk("r", 3 + i, 1, [], True)]) for i in range(5)]
            tokens += script.run(runner, steps)["r"]
        return tokens

    runner = make_runner(media)
    ours = run(runner)
    assert runner._decode is not None
    runner.execute(Step(9, finished=["r"]))
    assert runner._decode is None
    monkeypatch.setattr(DecodeBatch, "advance", lambda *_: False)
    assert run(make_runner(media)) == ours


def test_penalties_see_the_tokens_of_a_carried_batch(make_runner, monkeypatch):
    def run() -> dict[str, list[int]]:
        media = tiny.MemoryMedia()
        requests = tiny.mixed_requests(media, frequency_penalty=2.0)
        return script.run(make_runner(media), script.write_steps(requests, 20, 100_000, 16, NUM_BLOCKS))

    ours = run()
    monkeypatch.setattr(DecodeBatch, "advance", lambda *_: False)
    assert run() == ours
