"""The pool of KV-cache blocks: which are held, and which hold a prefix that can be found again.

It knows block ids and hashes, not tensors. A block is held (by one sequence, or by several that share it) or free; a
free block may still be cached: it is reused only when no plain block is left, least recently used first.

Copy-on-write is not needed: only full blocks are shared, and a sequence writes each slot once, past all of its full
blocks. A sequence that shares a prefix computes the tokens of a block that is not full again, in a block of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Allocates the ids `0 .. num_blocks - 1`. A freed block may be reused at once, even while a dispatched step still
    writes to it: every worker runs its steps in order, and a sequence writes each slot before it reads it.
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
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks without content, or None when there are not that many; then nothing was taken."""
        if count > self.num_free:
            return None
        return [self._take() for _ in range(count)]

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of `hashes` that is known; not held yet."""
        found = []
        for value in hashes:
            block = self._block_of.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that `find` returned."""
        for block in blocks:
            if not self._holders[block]:
                del self._cached[block]
            self._holders[block] += 1

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these no sequence holds: `hold` would take that many out of `num_free`."""
        return sum(not self._holders[block] for block in blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Stop holding a sequence's blocks. Its last ones are reused first: a shared prefix needs all blocks before."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is freed more often than held"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._plain.append(block)

    def publish(self, block: int, value: bytes) -> None:
        """`block` is full, and `find` returns it for `value`, unless a held block has the same content. A free one with
        that content becomes plain: the prefix was last used with this block."""
        other = self._block_of.get(value)
        if block in self._hash_of or (other is not None and self._holders[other]):
            return
        if other is not None:
            del self._cached[other], self._hash_of[other]
            self._plain.append(other)
        self._block_of[value] = block
        self._hash_of[block] = value

    def forget_prefixes(self) -> None:
        """Forget all prefixes; held blocks stay held."""
        self._hash_of.clear()
        self._block_of.clear()
        self._plain += self._cached
        self._cached.clear()

    def _take(self) -> int:
        if self._plain:
            block = self._plain.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._holders[block] = 1
        return block
