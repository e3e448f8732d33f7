"""The flat batch and the per-sequence state against plain loops."""

import json

import numpy as np
import pytest
import torch

from mini_engine.messages import Chunk
from mini_engine.model.config import ModelConfig
from mini_engine.worker.batch import build_batch
from mini_engine.worker.sequences import IntBuffer, SequenceState
from tests.worker import tiny


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
    assert (buffer[0], buffer[198]) == (1, 199)
    for outside in (199, -1):  # what a longer past may have left in the room must not be read
        with pytest.raises(IndexError, match=f"{outside} is not within 199 values"):
            buffer[outside]
    buffer.extend_at(2, [9])
    assert (buffer.array.tolist(), len(buffer)) == ([1, 2, 9], 3)
    for index in (3, 2, 3):
        buffer.put(index, 10 * index)
    assert buffer.array.tolist() == [1, 2, 20, 30]
    short = IntBuffer()
    short.put(0, 4)
    assert short.array.tolist() == [4]
    buffer.extend_at(0, [])
    assert buffer.array.tolist() == []


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
    assert np.array_equal(state.positions(length + 1, length + 2), positions[:, length + 1 : length + 2])


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
    assert not batch.decodes
    assert batch.greedy


def test_blocks_left_unwritten_are_named(sequences):
    state = sequences["text"]

    def take(start: int, count: int, blocks: list[int], restart: bool = False) -> list[int]:
        return state.take_blocks(Chunk("text", start, count, blocks, False, restart), 16)

    assert take(0, 32, [9, 8, 7]) == [7]
    assert take(32, 8, []) == []
    assert take(40, 9, [5]) == [5]
    assert state.blocks.array.tolist() == [9, 8, 7, 5]
    assert take(0, 20, [1, 2], restart=True) == [2]
    assert state.blocks.array.tolist() == [1, 2]
    # Blocks 3 and 4 hold 32 tokens that another sequence computed, and 6 the first of this chunk's.
    assert take(32, 10, [3, 4, 6], restart=True) == [6]
    assert take(40, 8, [3, 4, 6], restart=True) == []
    assert take(0, 1, [], restart=True) == []
    assert len(state.blocks) == 0


def test_the_first_chunk_may_start_behind_blocks_of_others(sequences):
    state = sequences["text"]
    assert state.take_blocks(Chunk("text", 32, 5, [3, 4, 6], False), 16) == [6]
    assert state.blocks.array.tolist() == [3, 4, 6]


def test_rows_of_items_within_a_chunk(sequences):
    state = sequences["two"]
    video, image = state.media
    encoded = {item.media_hash: torch.arange(item.num_tokens) + 1000 * i for i, item in enumerate(state.media)}
    whole = {first: rows.tolist() for first, rows in state.embeddings_within(0, state.prompt_length, encoded)}
    assert whole == {video.offset: list(range(54)), image.offset: [1000, 1001, 1002, 1003]}
    cut = [(i, rows.tolist()) for i, rows in state.embeddings_within(video.offset + 50, image.offset + 1, encoded)]
    assert cut == [(video.offset + 50, [50, 51, 52, 53]), (image.offset, [1000])]
    assert list(state.embeddings_within(0, video.offset, {})) == []


def test_placeholders_that_fit_no_item_are_refused(config):
    new = tiny.make_request(tiny.MemoryMedia(), "r", [1, tiny.IMAGE])
    with pytest.raises(ValueError, match="no item left"):
        SequenceState(new, config)
