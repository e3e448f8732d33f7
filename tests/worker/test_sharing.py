"""What sequences share on a rank, blocks of a common prefix and encoded items, changes no token."""

import msgspec
import pytest
import torch

from mini_engine.messages import Chunk, EncodeItem, NewSequence, Step
from tests.worker import script, tiny

COUNT = 20


def twins(media: tiny.MemoryMedia, name: str) -> tuple[NewSequence, NewSequence]:
    """A request twice; the second has its media under handles that no rank ever receives."""
    (first,) = [new for new in tiny.mixed_requests(media) if new.request_id == name]
    handles = [media.put(torch.empty(0)) for _ in first.media]
    items = [msgspec.structs.replace(i, patches=h) for i, h in zip(first.media, handles, strict=True)]
    for handle in handles:
        del media.tensors[handle.message]
    return first, msgspec.structs.replace(first, request_id="second", media=items)


@pytest.mark.parametrize("name", ["text", "image", "video", "two"])
@pytest.mark.parametrize(("block_size", "shared"), [(4, 1), (4, 3), (16, 0), (16, 1)])
def test_a_start_behind_the_blocks_of_another(name, block_size, shared, make_runner, expected):
    media = tiny.MemoryMedia()
    first, second = twins(media, name)
    runner = make_runner(media, block_size)
    steps = script.share_prefix(first, second, shared, COUNT, block_size)
    common = steps[0].chunks[0].block_ids[:shared]
    tokens = script.run(runner, steps[:1])
    before = runner._cache.storage[:, :, common].clone()
    for request_id, more in script.run(runner, steps[1:]).items():
        tokens[request_id] = tokens.get(request_id, []) + more
    assert tokens == {first.request_id: expected[first.request_id], "second": expected[first.request_id]}
    assert torch.equal(runner._cache.storage[:, :, common], before)
    assert not runner._sequences
    assert not runner._encoded


def test_nothing_need_be_encoded_for_items_that_lie_in_shared_blocks(make_runner, expected):
    media = tiny.MemoryMedia()
    first, second = twins(media, "image")
    (item,) = first.media
    shared = -(-(item.offset + item.num_tokens) // 2)
    assert 2 * shared < len(first.prompt_token_ids)
    first_step, second_step, *rest = script.share_prefix(first, second, shared, COUNT, 2)
    steps = [first_step, msgspec.structs.replace(second_step, evict=[item.media_hash]), *rest[:-1]]
    tokens = script.run(make_runner(media, 2), steps)
    assert tokens["second"] == expected["image"]


def prefill(new: NewSequence, number: int, first_block: int, **fields) -> Step:
    length = len(new.prompt_token_ids)
    blocks = list(range(first_block, first_block - (-length // 16)))
    return Step(number, started=[new], chunks=[Chunk(new.request_id, 0, length, blocks, True)], **fields)


def test_an_item_is_encoded_once_and_again_after_it_was_evicted(make_runner, expected, monkeypatch):
    media = tiny.MemoryMedia()
    first, second = twins(media, "two")
    third = msgspec.structs.replace(first, request_id="third")
    runner = make_runner(media)
    encoded = []
    encode = runner.encode_patches
    monkeypatch.setattr(runner, "encode_patches", lambda raw, grids: encoded.append(list(grids)) or encode(raw, grids))
    hashes = [item.media_hash for item in first.media]
    steps = [
        prefill(first, 1, 0, encode=[EncodeItem("two", 0, 0, 9), EncodeItem("two", 1, 0, 1)]),
        # Its owner is gone; the item stays.
        prefill(second, 2, 50, finished=["two"]),
        prefill(third, 3, 100, evict=hashes, encode=[EncodeItem("third", 0, 0, 9), EncodeItem("third", 1, 0, 1)]),
    ]
    tokens = script.run(runner, steps)
    assert tokens == {name: expected["two"][:1] for name in ("two", "second", "third")}
    grids = [item.grid_thw for item in first.media]
    assert encoded == [grids, grids]


def test_an_evicted_item_is_an_error_where_it_is_needed(make_runner):
    media = tiny.MemoryMedia()
    first, second = twins(media, "image")
    runner = make_runner(media)
    runner.execute(prefill(first, 1, 0, encode=[EncodeItem("image", 0, 0, 1)]))
    with pytest.raises(RuntimeError, match="second: item 0 is needed at token 2 but not encoded"):
        runner.execute(prefill(second, 2, 50, evict=[first.media[0].media_hash]))
