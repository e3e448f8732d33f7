"""What a rank keeps of media, and that a request which only names it is computed like the one that brought it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from mini_engine.messages import Chunk, EncodeItem, KeepMedia, MessageId, Step, TensorHandle
from mini_engine.worker.media_store import MediaStore
from tests.worker import tiny

HANDLE = TensorHandle(MessageId(1, 1), 0, (2, 3), "uint8")


def test_what_is_kept_is_a_copy():
    received = torch.arange(6, dtype=torch.uint8).view(2, 3)
    store = MediaStore(lambda handle: received, lambda handle: received)
    store.keep([KeepMedia(b"a", HANDLE)])
    received.fill_(0xFF)  # the buffer is its sender's again
    item = msgspec.structs.replace(tiny.make_request(tiny.MemoryMedia(), "r", [(1, 4, 4)]).media[0], patches=None)
    item = msgspec.structs.replace(item, media_hash=b"a")
    assert store.patches(item).tolist() == [[0, 1, 2], [3, 4, 5]]
    store.drop([b"a"])
    assert len(store) == 0
    with pytest.raises(RuntimeError, match="media 61 is to be dropped"):
        store.drop([b"a"])
    with pytest.raises(RuntimeError, match="media 61 came without a tensor"):
        store.patches(item)


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


def test_a_request_whose_media_lie_in_a_store_gets_the_same_token(make_runner):
    media = tiny.MemoryMedia()
    new = tiny.make_request(media, "brings", [1, (3, 4, 4), 2, (1, 6, 4)])
    stored = [
        msgspec.structs.replace(item, patches=media.store(media.tensor(item.patches)), media_hash=bytes([index]) * 16)
        for index, item in enumerate(new.media)
    ]
    length = len(new.prompt_token_ids)

    def step(number, request, **more):
        chunks = [Chunk(request.request_id, 0, length, list(range(length)), True)]
        encode = [EncodeItem(request.request_id, 0, 0, 3), EncodeItem(request.request_id, 1, 0, 1)]
        return Step(number, started=[request], encode=encode, chunks=chunks, **more)

    moved = []
    runner = make_runner(media, to_device=lambda tensor: moved.append(tensor) or tensor.clone())
    (first,) = runner.execute(step(1, new)).tokens
    again = msgspec.structs.replace(new, request_id="stored", media=stored)
    (second,) = runner.execute(step(2, again, finished=["brings"], drop_senders=[5], drop_segments=[7, 8])).tokens
    assert second.token_id == first.token_id and len(moved) == 4
    addresses = {tensor.data_ptr() for tensor in media.objects.values()}
    assert {tensor.data_ptr() for tensor in moved[2:]} == addresses, "the copy to the device starts from the store"
    assert media.dropped == [5] and media.unmapped == [7, 8]
