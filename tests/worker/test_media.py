"""What a rank keeps of media and what sequences share: kept patches, items encoded slice by slice, blocks of a common
prefix. None of it changes a token."""

import gc
import os
import weakref

import msgspec
import pytest
import torch

from mini_engine.messages import Chunk, EncodeItem, KeepMedia, MessageId, NewSequence, Step, StoreHandle, TensorHandle
from mini_engine.transport.arena import ReadableMemory, WritableMemory
from mini_engine.transport.page_allocator import PAGE_BYTES
from mini_engine.transport.shared_memory import create_sparse
from mini_engine.worker.model_runner import keep_rows
from tests.support import script, tiny

COUNT = 20


def prefill(new: NewSequence, number: int, first_block: int, **fields) -> Step:
    length = len(new.prompt_token_ids)
    blocks = list(range(first_block, first_block - (-length // 16)))
    return Step(number, started=[new], chunks=[Chunk(new.request_id, 0, length, blocks, True)], **fields)


def test_a_request_that_names_kept_media_gets_the_same_token(make_runner):
    media = tiny.MemoryMedia()
    new = tiny.make_request(media, "brings", [1, (3, 4, 4), 2])
    (item,) = new.media
    named = msgspec.structs.replace(new, request_id="names", media=[msgspec.structs.replace(item, patches=None)])
    keep, encode = [KeepMedia(item.media_hash, item.patches)], [EncodeItem("names", 0, 0, 3)]
    runner = make_runner(media)
    (first,) = runner.execute(prefill(new, 1, 0, encode=[EncodeItem("brings", 0, 0, 3)], keep=keep)).tokens
    media.tensor(item.patches).fill_(0xFF)  # the memory is the sender's again
    second_step = prefill(named, 2, 9, encode=encode, finished=["brings"], evict=[item.media_hash])
    (second,) = runner.execute(second_step).tokens
    assert second.token_id == first.token_id
    runner.execute(Step(3, finished=["names"], drop=[item.media_hash], evict=[item.media_hash]))
    with pytest.raises(KeyError):
        runner.execute(prefill(named, 4, 9, encode=encode))


@pytest.mark.parametrize("extents", [[(3, 1)], [(5, 1), (1, 1), (2, 1)]])
def test_a_request_whose_media_lie_in_the_store_gets_the_same_token(make_runner, extents):
    """Over two steps, so that parts of an item are read; in one extent, or in several that no row ends with."""
    media, fd = tiny.MemoryMedia(), create_sparse(9 * PAGE_BYTES)
    store, media.store = WritableMemory(fd), ReadableMemory(fd)
    os.close(fd)
    grid = (len(extents) * PAGE_BYTES // tiny.PATCH_DIM // 16, 4, 4)
    new = tiny.make_request(media, "brings", [1, grid, 2, (1, 6, 4)])
    stored = []
    for item, place in zip(new.media, (extents, [(8, 1)]), strict=True):
        patches = media.tensor(item.patches)
        store.write(place, patches.view(-1))
        handle = StoreHandle(place, tuple(patches.shape))
        stored.append(msgspec.structs.replace(item, patches=handle, media_hash=bytes([place[0][0]])))
    half = grid[0] // 2

    def steps(request: NewSequence, first_block: int) -> list[Step]:
        """The second half of the video is encoded with the image."""
        name = request.request_id
        rest = [EncodeItem(name, 0, half, grid[0] - half), EncodeItem(name, 1, 0, 1)]
        last = prefill(request, 2, first_block, encode=rest)
        return [
            Step(1, started=last.started, encode=[EncodeItem(name, 0, 0, half)]),
            msgspec.structs.replace(last, started=[]),
        ]

    again = msgspec.structs.replace(new, request_id="stored", media=stored)
    tokens = script.run(make_runner(media, num_blocks=1000), steps(new, 0) + steps(again, 500))
    assert tokens["stored"] == tokens["brings"]


def test_tokens_after_slices(make_runner, expected):
    media = tiny.MemoryMedia()
    (new,) = tiny.mixed_requests(media, names=["two"])
    image = EncodeItem("two", 1, 0, 1)
    for slices in (
        [[EncodeItem("two", 0, first, 1)] for first in range(9)] + [[image]],
        [[EncodeItem("two", 0, 0, 4)], [EncodeItem("two", 0, 4, 1), image], [EncodeItem("two", 0, 5, 4)]],
        [[EncodeItem("two", 0, 0, 5), image], [EncodeItem("two", 0, 0, 2)], [EncodeItem("two", 0, 2, 7)]],
        [
            [EncodeItem("two", 0, 0, 1, 0, 1), image],
            [EncodeItem("two", 0, 0, 1, 1), EncodeItem("two", 0, 1, 7), EncodeItem("two", 0, 8, 1, 0, 1)],
            [EncodeItem("two", 0, 8, 1, 1)],
        ],
    ):
        steps = [Step(1, started=[new]), *(Step(2, encode=items) for items in slices)]
        last = msgspec.structs.replace(prefill(new, 3, 0), started=[])
        assert script.run(make_runner(media), [*steps, last]) == {"two": expected["two"][:1]}


def test_an_evicted_item_drops_its_hidden_states(make_runner):
    media = tiny.MemoryMedia()
    new = tiny.make_request(media, "video", [(2, 4, 4)])
    (item,), runner = new.media, make_runner(media)
    part = EncodeItem("video", 0, 0, 1, 0, 1)
    runner.execute(Step(1, started=[new], encode=[part]))
    runner.execute(Step(2, evict=[item.media_hash]))
    with pytest.raises(KeyError):
        runner.execute(Step(3, encode=[msgspec.structs.replace(part, begin=1, end=None)]))
    runner.execute(Step(4, encode=[EncodeItem("video", 0, 0, 1)]))
    runner.execute(Step(5, encode=[EncodeItem("video", 0, 1, 1, 0, 1)]))
    runner.execute(Step(6, evict=[item.media_hash]))
    with pytest.raises(KeyError):
        runner.execute(Step(7, evict=[item.media_hash]))


def test_rows_that_were_encoded_together_are_kept_in_memory_of_each_item():
    encoded: dict[bytes, torch.Tensor] = {}
    (item,) = tiny.make_request(tiny.MemoryMedia(), "image", [(1, 4, 4)]).media
    together = torch.arange(16.0).view(8, 2)
    keep_rows(encoded, item, 0, together[4:])
    kept = weakref.ref(together.untyped_storage())
    del together
    gc.collect()
    assert kept() is None
    assert encoded[item.media_hash].flatten().tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    ("name", "size", "shared"), [("text", 4, 3), ("image", 4, 3), ("video", 16, 0), ("two", 16, 1)]
)
def test_a_start_behind_the_blocks_of_another(name, size, shared, make_runner, expected):
    """Items that lie in the shared blocks, or were encoded before, need no patches: the second request has them under
    handles that no rank ever receives. And again after a preemption."""
    media = tiny.MemoryMedia()
    (first,) = tiny.mixed_requests(media, names=[name])
    lost = TensorHandle(MessageId(99, 99), (1, 1))
    items = [msgspec.structs.replace(item, patches=lost) for item in first.media]
    second = msgspec.structs.replace(first, request_id="second", media=items)
    length, start = len(first.prompt_token_ids), shared * size
    encode = [EncodeItem(name, index, 0, item.grid_thw[0]) for index, item in enumerate(first.media)]
    ours = list(range(-(-length // size)))
    tables = [[*ours[:shared], *range(free, free + (length + COUNT) // size + 1)] for free in (60, 120)]
    steps = [
        Step(1, started=[first], encode=encode, chunks=[Chunk(name, 0, length, ours, True)]),
        Step(2, started=[second], chunks=[Chunk("second", start, length - start, tables[0], True)], finished=[name]),
    ]
    for i in range(COUNT - 1):
        chunk = Chunk("second", length + i, 1, [], True)
        if i == COUNT // 2:
            chunk = Chunk("second", start, length + i + 1 - start, tables[1], True, restart=True)
        steps.append(Step(3 + i, chunks=[chunk]))
    tokens = script.run(make_runner(media, block_size=size), steps)
    assert tokens == {name: expected[name][:1], "second": expected[name]}
