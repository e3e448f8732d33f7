"""What a rank keeps of media, and that a request which only names it is computed like the one that brought it."""

from __future__ import annotations

import os

import msgspec
import pytest
import torch

from mini_engine.messages import Chunk, EncodeItem, KeepMedia, MessageId, Step, TensorHandle
from mini_engine.transport.arena import ReadableMemory
from mini_engine.transport.memory import create_sparse
from mini_engine.transport.pages import PAGE_BYTES
from mini_engine.worker.media_store import MediaStore
from tests.worker import tiny

HANDLE = TensorHandle(MessageId(1, 1), (2, 3), "uint8")


def test_what_is_kept_is_a_copy():
    received = torch.arange(6, dtype=torch.uint8).view(2, 3)
    store = MediaStore(lambda handle, first, stop: received[first:stop])
    store.keep([KeepMedia(b"a", HANDLE)])
    received.fill_(0xFF)  # the buffer is its sender's again
    item = msgspec.structs.replace(tiny.make_request(tiny.MemoryMedia(), "r", [(1, 4, 4)]).media[0], patches=None)
    item = msgspec.structs.replace(item, media_hash=b"a")
    assert store.patches(item, 0, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert store.patches(item, 1, 2).tolist() == [[3, 4, 5]]
    store.drop([b"a"])
    assert len(store) == 0
    with pytest.raises(RuntimeError, match="media 61 is to be dropped"):
        store.drop([b"a"])
    with pytest.raises(RuntimeError, match="media 61 came without a tensor"):
        store.patches(item, 0, 1)


def test_a_request_that_names_kept_media_gets_the_same_token(make_runner):
    media = tiny.MemoryMedia()
    new = tiny.make_request(media, "brings", [1, (3, 4, 4), 2])
    (item,) = new.media
    named = msgspec.structs.replace(
        new, request_id="names", media=[msgspec.structs.replace(item, patches=None)]
    )  # fmt: skip
    runner, length = make_runner(media), len(new.prompt_token_ids)
    blocks = list(range(length))

    def step(number, request, **more):
        chunks = [Chunk(request.request_id, 0, length, blocks, True)]
        encode = [EncodeItem(request.request_id, 0, 0, 3)]
        return Step(number, started=[request], encode=encode, chunks=chunks, **more)

    keep = [KeepMedia(item.media_hash, item.patches)]
    (first,) = runner.execute(step(1, new, keep=keep, release=[item.patches.message])).tokens
    (second,) = runner.execute(step(2, named, finished=["brings"], evict=[item.media_hash])).tokens
    assert second.token_id == first.token_id
    runner.execute(Step(3, finished=["names"], drop=[item.media_hash]))
    with pytest.raises(RuntimeError, match="is not kept here"):
        runner.execute(step(4, named, evict=[item.media_hash]))


@pytest.mark.parametrize("extents", [[(3, 1)], [(5, 1), (1, 1), (2, 1)]])
def test_a_request_whose_media_lie_in_the_store_gets_the_same_token(make_runner, extents):
    """Over two steps, so that parts of an item are read; in one extent, or in several that no row ends with."""
    media, store = tiny.MemoryMedia(), tiny.StoreInMemory(9)
    rows = len(extents) * PAGE_BYTES // tiny.PATCH_DIM
    grids = (rows // 16, 4, 4)
    new = tiny.make_request(media, "brings", [1, grids, 2, (1, 6, 4)])
    video, image = (media.tensor(item.patches) for item in new.media)
    handles = [store.put(extents, video), store.put([(8, 1)], image)]
    stored = [
        msgspec.structs.replace(item, patches=handle, media_hash=bytes([index]) * 16)
        for index, (item, handle) in enumerate(zip(new.media, handles, strict=True))
    ]
    length = len(new.prompt_token_ids)

    def steps(number, request, **more):
        """Two: the second half of the video is encoded with the image."""
        half = grids[0] // 2
        encode = [EncodeItem(request.request_id, 0, half, grids[0] - half), EncodeItem(request.request_id, 1, 0, 1)]
        chunks = [Chunk(request.request_id, 0, length, list(range(-(-length // 16))), True)]
        yield Step(number, started=[request], encode=[EncodeItem(request.request_id, 0, 0, half)], **more)
        yield Step(number + 1, encode=encode, chunks=chunks)

    moved = []
    media.store = store.readable
    runner = make_runner(media, to_device=lambda tensor: moved.append(tensor) or tensor.clone())
    *_, first = [runner.execute(step) for step in steps(1, new)]
    again = msgspec.structs.replace(new, request_id="stored", media=stored)
    *_, second = [runner.execute(step) for step in steps(3, again, finished=["brings"], drop_senders=[5])]
    assert second.tokens[0].token_id == first.tokens[0].token_id and media.dropped == [5]
    one_extent = [store.readable.read([(8, 1)], 0, 1), *[store.readable.read(extents, 0, 1)] * (len(extents) == 1)]
    addresses = {tensor.data_ptr() for tensor in one_extent}
    assert addresses <= {tensor.data_ptr() for tensor in moved}, "the copy to the device starts from the store"


def test_the_mark_of_a_step_is_registered_once():
    ranges = []
    fd = create_sparse(8 * PAGE_BYTES)
    memory = ReadableMemory(fd, lambda address, nbytes: ranges.append((address, nbytes)))
    os.close(fd)
    for mark in (4, 2, 4, 8):
        memory.register(mark * PAGE_BYTES)
    (start, first), (then, second) = ranges
    assert (first, second, then) == (4 * PAGE_BYTES, 4 * PAGE_BYTES, start + first)
