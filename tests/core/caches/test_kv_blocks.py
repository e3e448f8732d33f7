"""The block pool against a plain record of the holders of each block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.core.caches.kv_blocks import BlockPool

actions = st.lists(st.tuples(st.sampled_from(["new", "same", "end", "reset"]), st.integers(0, 9)), max_size=80)


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 12), actions=actions)
def test_any_use_keeps_each_block_in_one_place(size, actions):
    """Sequences take blocks of their own, share the published ones of a prefix, and end in any order."""
    pool = BlockPool(size, 4)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}  # what each block was published with last
    for action, number in actions:
        if action == "reset":
            pool.forget_prefixes()
            assert pool.find([b"%d/0" % n for n in range(10)]) == []
        elif action == "end" and held:
            pool.free(held.pop(number % len(held)))
        elif action in ("new", "same"):
            hashes = [b"%d/%d" % (number, i) for i in range(number % 4)]
            shared = pool.find(hashes) if action == "same" else []
            assert [content[block] for block in shared] == hashes[: len(shared)]
            taken = {block for blocks in held for block in blocks}
            blocks, needed = pool.allocate(1 + len(hashes), shared), 1 + len(hashes) - len(shared)
            if needed + len({*shared} - taken) > size - len(taken):
                assert blocks is None
                continue
            assert blocks[: len(shared)] == shared and not taken & {*blocks[len(shared) :]}
            held.append(blocks)
            for block, block_hash in zip(held[-1][len(shared) :], hashes[len(shared) :], strict=False):
                pool.publish(block, block_hash)
                content[block] = block_hash
        assert pool.num_used == len({block for blocks in held for block in blocks})
    for blocks in held:
        pool.free(blocks)
    assert pool.num_free == size
    assert sorted(pool.allocate(size) or []) == list(range(size))


def test_prefix_eviction_is_lru_and_starts_at_the_end():
    pool = BlockPool(4, 4)
    for name in (b"old", b"new"):
        blocks = pool.allocate(2)
        for index, block in enumerate(blocks):
            pool.publish(block, name + b"%d" % index)
        pool.free(blocks)
    pool.allocate(1)
    assert len(pool.find([b"old0", b"old1"])) == 1 and len(pool.find([b"new0", b"new1"])) == 2
