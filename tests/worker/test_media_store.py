"""What a rank keeps of media, and that a request which only names it is computed like the one that brought it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from mini_engine.messages import Chunk, EncodeItem, KeepMedia, MessageId, Step, TensorHandle
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
    assert store.rows(item, 0, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert store.rows(item, 1, 2).tolist() == [[3, 4, 5]]
    store.drop([b"a"])
    assert len(store) == 0
    with pytest.raises(RuntimeError, match="media 61 is to be dropped"):
        store.drop([b"a"])
    with pytest.raises(RuntimeError, match="media 61 came without a tensor"):
        store.rows(item, 0, 1)


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
