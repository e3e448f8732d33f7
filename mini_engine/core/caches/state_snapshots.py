"""The memory of recurrent states: one state for each running sequence, and snapshots that can be found again.

A recurrent state cannot be cut into blocks as keys and values are: it describes all tokens before it. So it is copied
at the ends of chosen full blocks, and a prefix is found as far as there are both its KV blocks and a snapshot. A freed
index may be reused at once, even while a dispatched step still reads the state there: every worker runs its steps in
order, and fills a sequence's state before anything else in a step.
"""

from collections import OrderedDict
from collections.abc import Sequence

from mini_engine.config import EngineConfig
from mini_engine.core.request import Request
from mini_engine.messages import EngineLimits

LEAST_INTERVAL = 256  # tokens; requests diverge at places that have snapshots of their own, seldom elsewhere


class StatePool:
    """Allocates the state indices `0 .. num_states - 1`: the first to sequences, one for each that a step may have, and
    the others to snapshots. `num_states` is 0 if the model has no recurrent states."""

    def __init__(self, config: EngineConfig, limits: EngineLimits):
        self.is_needed = limits.num_states > 0
        self._block_size = size = limits.block_size
        num_sequences = config.step_sequences(limits.device, self.is_needed)
        self._sequences = list(reversed(range(num_sequences)))
        self._unused = list(reversed(range(num_sequences, limits.num_states)))
        # Tokens from one snapshot of a long prompt to the next, a multiple of the block size. Without the flag there
        # are snapshots enough for all that the KV cache holds.
        spread = max(LEAST_INTERVAL, limits.num_blocks * size // max(1, len(self._unused)))
        self._interval = config.state_snapshot_interval or -(-spread // size) * size
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # prefix hash -> index, least recently used first

    @property
    def num_snapshots(self) -> int:
        """Snapshots that can be found."""
        return len(self._snapshots)

    def allocate(self) -> int:
        """An index for a sequence; there is one."""
        return self._sequences.pop()

    def free(self, index: int) -> None:
        self._sequences.append(index)

    def find(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest prefix with a snapshot; `hashes`: of the prefixes that end with each block."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._snapshots), 0)

    def use(self, prefix_hash: bytes) -> int | None:
        """The index of a prefix's snapshot, which becomes the most recently used one; None: there is none."""
        if prefix_hash in self._snapshots:
            self._snapshots.move_to_end(prefix_hash)
        return self._snapshots.get(prefix_hash)

    def choose_snapshots(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """`Chunk.snapshots` of the request's tokens from `start` to `end`: at the last block boundary before each place
        where another request may diverge (the end of an item, of the prompt, of the output so far), and in the prompt
        at each interval."""
        size = self._block_size
        if not self.is_needed or request.prefix_salt is None or start // size == end // size:
            return []
        in_prompt = min(end, request.num_prompt - 1)
        prefixes = {item.end // size * size for item in request.media} | {in_prompt // size * size}
        prefixes.update(range(start // self._interval * self._interval, in_prompt + 1, self._interval))
        if end > request.num_prompt:
            prefixes.add(end // size * size)
            self.drop(request.last_snapshot)
        hashes, snapshots = request.block_hashes(size), []
        # The longest prefix first: state indices may run short.
        for prefix in sorted((prefix for prefix in prefixes if start < prefix <= end), reverse=True):
            known = prefix // size <= len(hashes) and self.use(hashes[prefix // size - 1]) is not None
            if not known and (state_index := self.reserve()) is not None:
                snapshots.append((prefix, state_index))
        return snapshots[::-1]

    def reserve(self) -> int | None:
        """An index for a snapshot, perhaps that of the least recently used one; None: all are reserved."""
        if not self._unused and self._snapshots:
            self._unused.append(self._snapshots.popitem(last=False)[1])
        return self._unused.pop() if self._unused else None

    def publish(self, prefix_hash: bytes, index: int) -> bool:
        """The state after a prefix lies at a reserved index now. False: there is one already, and the index is free."""
        if prefix_hash in self._snapshots:
            self.cancel(index)
            return False
        self._snapshots[prefix_hash] = index
        return True

    def cancel(self, index: int) -> None:
        self._unused.append(index)

    def drop(self, prefix_hash: bytes | None) -> None:
        """Free a prefix's snapshot, if there is one."""
        if prefix_hash is not None and prefix_hash in self._snapshots:
            self._unused.append(self._snapshots.pop(prefix_hash))
