"""A replicated vision tower with its work split over the ranks: each encodes some of a call's frames.

It saves the two sums per layer over all ranks that sharded weights cost, for memory: the whole tower on each rank. No
layer of a tower attends across temporal grids, so a video may be cut between them. Knows nothing of families.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.model.config import VisionConfig
from mini_engine.model.parallel import Placement
from mini_engine.model.rope import Grid
from mini_engine.model.towers.vision import VisionTower


@dataclass(frozen=True)
class Share:
    """One rank's part of a call: a run of whole temporal grids, as grids of their own, and their patches."""

    grids: tuple[Grid, ...]
    patches: slice

    @property
    def num_patches(self) -> int:
        return self.patches.stop - self.patches.start


def share_out(grids: Sequence[Grid], ranks: int) -> list[Share]:
    """Cut a call's temporal grids into one run for each rank, about equal in patches.

    A temporal grid goes to the rank in whose equal part of all patches its middle lies: so a rank has at most one grid
    more than that part, and none of the order changes. Ranks may get nothing.
    """
    total = sum(t * h * w for t, h, w in grids)
    runs: list[list[Grid]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    start = 0
    for t, h, w in grids:
        size = h * w
        owners = [(2 * (start + i * size) + size) * ranks // (2 * total) for i in range(t)]
        for owner in sorted(set(owners)):
            count = owners.count(owner)
            runs[owner].append((count, h, w))
            sizes[owner] += count * size
        start += t * size
    ends = [sum(sizes[: rank + 1]) for rank in range(ranks)]
    return [Share(tuple(run), slice(end - size, end)) for run, size, end in zip(runs, sizes, ends, strict=True)]


class SpreadTower(nn.Module):
    """Runs as the tower that `build` makes, with the same result."""

    def __init__(
        self, build: Callable[[VisionConfig, Placement], VisionTower], config: VisionConfig, at: Placement
    ) -> None:
        super().__init__()
        self.config, self.tp = config, at.tp
        self.tower = build(config, at.alone())

    def own_patches(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """This rank's part of each item's patches, as a view; it may be empty."""
        own, start, parts = share_out(grids, self.tp.size)[self.tp.rank].patches, 0, []
        for item in patches:
            parts.append(item[max(0, own.start - start) : max(0, own.stop - start)])
            start += len(item)
        return parts

    def run(self, patches: Tensor, grids: Sequence[Grid]) -> Iterator[Tensor]:
        """As `VisionTower.run`, but every rank passes only its `own_patches` of the call; it gets all rows. A
        collective at its end."""
        shares = share_out(grids, self.tp.size)
        own = shares[self.tp.rank].grids
        # A rank without a share takes part in the collective all the same, which requires equal shapes.
        nothing = itertools.repeat(patches.new_empty(0, self.config.row_size), self.config.depth)
        blocks = self.tower.run(patches, own) if own else nothing
        yield from itertools.islice(blocks, self.config.depth - 1)
        rows = next(blocks)
        counts = [share.num_patches // self.config.merge_unit for share in shares]
        missing = max(counts) - len(rows)
        gathered = self.tp.all_gather(F.pad(rows, (0, 0, 0, missing)) if missing else rows)
        if len(set(counts)) == 1:
            yield gathered.flatten(0, 1)
        else:
            yield torch.cat([gathered[rank, :count] for rank, count in enumerate(counts)])
