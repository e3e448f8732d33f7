"""Items that are encoded slice by slice: the rows are those of the whole, and no part is used before all are there."""

import gc
import weakref

import pytest
import torch

from mini_engine.messages import Chunk, EncodeItem, NewSequence, Step
from mini_engine.worker.encoder_cache import EncoderCache
from mini_engine.worker.model_runner import ModelRunner
from tests.worker import script, tiny

# Windows are 4 patches a side: whole ones, narrower ones at the right edge, and low ones at the bottom.
GRID = (7, 10, 14)


def encode(runner: ModelRunner, new: NewSequence, *steps: list[EncodeItem]) -> list[torch.Tensor]:
    runner.execute(Step(1, started=[new]))
    for items in steps:
        runner.execute(Step(2, encode=items))
    return [runner._encoded[item.media_hash] for item in new.media]


def test_slices_are_the_whole(make_runner):
    media = tiny.MemoryMedia()
    new = tiny.make_request(media, "r", [1, GRID, 2, (1, 6, 8)])
    image = EncodeItem("r", 1, 0, 1)
    whole = encode(make_runner(media), new, [EncodeItem("r", 0, 0, 7), image])
    assert [rows.shape for rows in whole] == [(item.num_tokens, 64) for item in new.media]
    for steps in (
        [[EncodeItem("r", 0, first, 1)] for first in range(7)] + [[image]],
        [[EncodeItem("r", 0, 0, 3)], [EncodeItem("r", 0, 3, 2), image], [EncodeItem("r", 0, 5, 2)]],
        [[EncodeItem("r", 0, 0, 4), image, EncodeItem("r", 0, 4, 3)]],
        [[EncodeItem("r", 0, 0, 5), image], [EncodeItem("r", 0, 0, 2)], [EncodeItem("r", 0, 2, 5)]],
    ):
        for ours, expected in zip(encode(make_runner(media), new, *steps), whole, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_tokens_after_slices(make_runner, expected):
    media = tiny.MemoryMedia()
    (new,) = [request for request in tiny.mixed_requests(media) if request.request_id == "two"]
    blocks = list(range(-(-len(new.prompt_token_ids) // 16)))
    steps = [
        Step(1, started=[new], encode=[EncodeItem("two", 0, 0, 4)], chunks=[Chunk("two", 0, 2, blocks, False)]),
        Step(2, encode=[EncodeItem("two", 0, 4, 1)]),
        Step(3, encode=[EncodeItem("two", 0, 5, 4), EncodeItem("two", 1, 0, 1)],
             chunks=[Chunk("two", 2, len(new.prompt_token_ids) - 2, [], True)]),
    ]  # fmt: skip
    assert script.run(make_runner(media), steps) == {"two": expected["two"][:1]}


def test_a_chunk_that_needs_an_item_of_which_a_part_is_there_is_an_error(make_runner):
    media = tiny.MemoryMedia()
    new = tiny.make_request(media, "r", [1, (3, 4, 4)])
    runner = make_runner(media)
    runner.execute(Step(1, started=[new], encode=[EncodeItem("r", 0, 0, 2)]))
    # The row of its one token is there.
    with pytest.raises(RuntimeError, match="r: item 0 is needed at token 2 but not encoded"):
        runner.execute(Step(2, chunks=[Chunk("r", 0, 3, [0], False)]))


def test_the_cache_owns_each_item_by_itself():
    cache, whole = EncoderCache(), torch.arange(12.0).view(6, 2)
    cache.add(b"a", 0, 4, whole[:4])
    cache.add(b"b", 0, 2, whole[4:])
    kept = weakref.ref(whole.untyped_storage())
    del whole
    gc.collect()
    assert kept() is None
    assert cache[b"b"].tolist() == [[8, 9], [10, 11]]
    cache.add(b"", 0, 1, torch.zeros(1, 2))
    cache.evict([b"a", b""])
    assert list(cache) == [b"b"]
    assert len(cache) == 1
    with pytest.raises(RuntimeError, match="media 61 is to be evicted"):
        cache.evict([b"a"])


def test_rows_that_come_alone_are_not_copied():
    cache, rows = EncoderCache(), torch.zeros(3, 2)
    cache.add(b"a", 0, 3, rows)
    assert cache[b"a"] is rows


def test_rows_come_in_order_and_the_first_begin_anew():
    cache, rows = EncoderCache(), torch.arange(12.0).view(6, 2)
    with pytest.raises(RuntimeError, match="media 61: rows 2 to 4 came, but no part of it is here"):
        cache.add(b"a", 2, 6, rows[2:4])
    cache.add(b"a", 0, 6, rows[:2])
    for first, last in ((1, 3), (3, 4)):
        with pytest.raises(RuntimeError, match=f"rows {first} to {last} came, but 2 of 6 is here"):
            cache.add(b"a", first, 6, rows[first:last])
    assert b"a" not in cache
    cache.add(b"a", 0, 6, rows[:3] + 1)
    cache.add(b"a", 3, 6, rows[3:])
    assert torch.equal(cache[b"a"], torch.cat((rows[:3] + 1, rows[3:])))
    cache.add(b"a", 0, 6, rows[:2])
    assert b"a" not in cache
    with pytest.raises(RuntimeError, match="rows 2 to 8 came, but 2 of 6 is here"):
        cache.add(b"a", 2, 6, torch.zeros(6, 2))
    cache.evict([b"a"])
    with pytest.raises(RuntimeError, match="is not in the encoder cache"):
        cache.evict([b"a"])
