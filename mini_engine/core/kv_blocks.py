"""The pool of KV-cache blocks: who holds which. It knows block ids, not tensors."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Hands out the ids `0 .. num_blocks - 1`. A freed block may be reused at once, even while a dispatched step still
    writes to it: every worker runs its steps in order, and a sequence writes each slot before it reads it.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        # The block freed last goes out first: memory that was never written to stays untouched.
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None when there are not that many; then nothing was taken."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        self._free.extend(blocks)
        assert len(self._free) <= self.num_blocks, "a block was freed twice"
