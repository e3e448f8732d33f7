"""The pool of KV-cache blocks: which are held, and which hold a prefix that can be found again.

It knows block ids and hashes, not tensors. A block is held (by one sequence, or by several that share it) or free; a
free block may still be cached: it is reused only when no plain block is left, least recently used first.

Copy-on-write is not needed: only full blocks are shared, and a sequence writes each cache index once, past all of its
full blocks. One that shares a prefix computes the tokens of a block that is not full again, in a block of its own.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Allocates the ids `0 .. num_blocks - 1`. A freed block may be reused at once, even while a dispatched step still
    writes to it: every worker runs its steps in order, and a sequence writes each cache index before it reads it.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        # The plain block freed last goes out first: memory that was never written to stays untouched.
        self._plain = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, longest unused first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return len(self._plain) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room(self, count: int, shared: Sequence[int]) -> bool:
        """Whether `allocate` would succeed."""
        return count - len(shared) + sum(not self._holders[block] for block in shared) <= self.num_free

    def allocate(self, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """`count` blocks for a sequence: those that `find` returned, then ones without content. None: too few are free;
        then nothing has changed."""
        if not self.has_room(count, shared):
            return None
        for block in shared:
            if not self._holders[block]:
                del self._cached[block]
            self._holders[block] += 1
        blocks = list(shared)
        while len(blocks) < count:
            if self._plain:
                block = self._plain.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                del self._block_of[self._hash_of.pop(block)]
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of `hashes` that is known; not held yet."""
        known = itertools.takewhile(self._block_of.__contains__, hashes)
        return [self._block_of[block_hash] for block_hash in known]

    def free(self, blocks: Sequence[int]) -> None:
        """Stop holding a sequence's blocks. Its last ones are reused first: a shared prefix needs all blocks before."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is freed more often than held"
            self._holders[block] -= 1
            if not self._holders[block] and block in self._hash_of:
                self._cached[block] = None
            elif not self._holders[block]:
                self._plain.append(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """`block` is full, and `find` returns it for `block_hash`, unless a held block has the same content. A free one
        with that content becomes plain: the prefix was last used with this block."""
        other = self._block_of.get(block_hash)
        if block in self._hash_of or (other is not None and self._holders[other]):
            return
        if other is not None:
            del self._cached[other], self._hash_of[other]
            self._plain.append(other)
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash

    def forget_prefixes(self) -> None:
        """Forget all prefixes; held blocks stay held."""
        self._hash_of.clear()
        self._block_of.clear()
        self._plain += self._cached
        self._cached.clear()
