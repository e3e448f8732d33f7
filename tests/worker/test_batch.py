"""The flat batch and the per-sequence state against plain loops; a decode batch that is carried on from step to step is
the one that a plain rebuild gives."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import Chunk, Step
from mini_engine.model.config import ModelConfig
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker import attention
from mini_engine.worker.attention import KVCache, SdpaBackend, StepAttention
from mini_engine.worker.batch import DecodeBatch, FlatBatch, IntBuffer, SequenceState, build_batch
from tests.worker import script, tiny

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


@pytest.fixture
def sequences(config) -> dict[str, SequenceState]:
    return {new.request_id: SequenceState(new, config) for new in tiny.mixed_requests(tiny.MemoryMedia())}


def test_buffer_grows_and_is_cut():
    buffer = IntBuffer([1, 2, 3])
    buffer.extend_at(3, range(4, 200))
    assert buffer.array.tolist() == list(range(1, 200))
    buffer.extend_at(2, [9])
    for index in (3, 2, 3):
        buffer.put(index, 10 * index)
    assert (buffer.array.tolist(), len(buffer), buffer[3]) == ([1, 2, 20, 30], 4, 30)


def test_positions_go_on_from_the_prompts_last_token(sequences):
    """A long video's last frame may have a larger position than the text after it."""
    state = sequences["two"]
    length = state.prompt_length
    positions = state.positions(0, length + 3)
    last = positions[:, length - 1]
    assert positions.max() > last.max()
    assert positions[:, length:].tolist() == [[int(last[0]) + i for i in (1, 2, 3)]] * 3
    assert [state.position(length + i) for i in range(3)] == positions[0, length:].tolist()
    assert np.array_equal(state.positions(5, length + 2), positions[:, 5 : length + 2])


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_layout(sequences, block_size):
    for state in sequences.values():
        state.tokens.put(state.prompt_length, 77)
    places = {"text": (10, 20), "image": (0, 5), "video": (34, 1), "two": (66, 1), "short": (0, 2), "block": (16, 1)}
    work, blocks = [], iter(range(5, 10_000, 3))
    for name, (start, count) in places.items():
        table = [next(blocks) for _ in range(-(-(start + count) // block_size))]
        sequences[name].take_blocks(Chunk(name, start, count, table, False), block_size)
        work.append((Chunk(name, start, count, [], name not in ("image", "text")), sequences[name]))
    batch, spans = build_batch(work, block_size)

    contexts = [span.context for span in spans if span.length == 1]
    assert contexts == sorted(contexts, reverse=True)
    row, sampled, last, in_prompt = 0, [], [], []
    for span in spans:
        chunk, state = next((c, s) for c, s in work if s.blocks.array.tolist() == span.blocks.tolist())
        assert (chunk.start, chunk.num_tokens) == (span.start, span.length)
        if chunk.start < state.prompt_length:
            in_prompt.append((chunk, state, row, span.context))
        positions = state.positions(0, 100)
        for index in range(span.start, span.context):
            assert batch.token_ids[row] == state.tokens.array[index]
            assert batch.positions[:, row].tolist() == positions[:, index].tolist()
            block = int(state.blocks.array[index // block_size])
            assert batch.slots[row] == block * block_size + index % block_size
            row += 1
        if chunk.samples:
            sampled.append((state, span.context))
            last.append(row - 1)
    assert row == len(batch.token_ids)
    assert batch.in_prompt == in_prompt
    assert list(zip(batch.sampled, batch.stops, strict=True)) == sampled
    assert torch.equal(batch.last_rows, torch.tensor(last))
    assert batch.greedy and not batch.decodes


def test_blocks_left_unwritten_are_named(sequences):
    state = sequences["text"]

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


def test_placeholders_that_fit_no_item_are_refused(config):
    new = tiny.make_request(tiny.MemoryMedia(), "r", [1, tiny.IMAGE])
    with pytest.raises(ValueError, match="no item left"):
        SequenceState(new, config)


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
            assert_equal(kept.batch, kept.attend, batch, attend)
        else:
            kept = DecodeBatch(chunks, batch, attend, backend) if batch.decodes else None
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


@pytest.mark.parametrize(("most", "made_again"), [(1 << 30, 0), (12, 3)])
def test_an_undisturbed_batch_is_carried_on(most, made_again, config, monkeypatch):
    """Its attention is made again when the groups change: three rows stay one; or they are in groups of 3, of 2 and 1,
    of 1 and 2, and at last of one each."""
    made = []

    class Noting(SdpaBackend):
        def step(self, *arguments) -> StepAttention:
            made.append(arguments)
            return super().step(*arguments)

    monkeypatch.setattr(attention, "GROUP_BYTES", most * CACHE.block_bytes)
    # The first step computes the prompts, the second is the first of its kind.
    assert play(config, [5, 4, 4], [{}] * 42, Noting(CACHE)) == 40
    assert len(made) == made_again


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

    def follows(*following: Chunk) -> bool:
        return DecodeBatch(chunks, batch, BACKEND.step(batch.slots, spans), BACKEND).advance(following)

    follow = {"request_id": "a", "start": 5, "num_tokens": 1, "block_ids": [], "samples": True, "restart": False}
    assert not follows(Chunk(**(follow | change))) and not follows()
    assert follows(Chunk(**follow))


def test_a_finished_sequence_is_dropped_and_one_of_its_name_is_another(make_runner):
    media = tiny.MemoryMedia()
    prompts = [1, 2, 3], [30, 20, 10]

    def run(*requests) -> dict[str, list[int]]:
        runner, steps = make_runner(media), []
        for new in requests:
            name = new.request_id
            steps.append(Step(1, started=[new], chunks=[Chunk(name, 0, 3, [0], True)]))
            steps += [Step(2 + i, chunks=[Chunk(name, 3 + i, 1, [], True)]) for i in range(5)]
            steps.append(Step(9, finished=[name]))
        return script.run(runner, steps)

    same = run(*(tiny.make_request(media, "r", pieces) for pieces in prompts))
    apart = run(*(tiny.make_request(media, name, pieces) for name, pieces in zip("ab", prompts, strict=True)))
    assert same["r"] == apart["a"] + apart["b"]
