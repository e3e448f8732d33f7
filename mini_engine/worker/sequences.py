"""What a rank keeps of each sequence between steps: tokens, positions, block table.

The engine core never sends a sampled token back, so a sequence's tokens live here; every rank keeps the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from mini_engine.messages import Chunk, MediaItem, NewSequence
from mini_engine.model.config import ModelConfig
from mini_engine.model.rope import mrope_positions
from mini_engine.worker.sampler import Recipe


class IntBuffer:
    """Growing int64 array; appending is cheap because the room doubles."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self._room = np.array(values, dtype=np.int64)
        self._length = len(values)

    def __len__(self) -> int:
        return self._length

    @property
    def array(self) -> np.ndarray:
        """View of the contents, valid until the next change."""
        return self._room[: self._length]

    def __getitem__(self, index: int) -> int:
        """One value, for less than half of what it costs through `array`.

        Raises:
            IndexError: nothing stands at `index`.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"{index} is not within {self._length} values")
        return self._room.item(index)

    def put(self, index: int, value: int) -> None:
        """`extend_at(index, [value])`, for a quarter of its cost."""
        if index >= len(self._room):
            self.extend_at(index, [value])
            return
        assert index <= self._length
        self._room[index] = value
        self._length = index + 1

    def extend_at(self, start: int, values: Sequence[int]) -> None:
        """Put `values` at `start`, which is at most the present length; what stood there or after is gone."""
        assert start <= self._length
        self._length = start + len(values)
        if self._length > len(self._room):
            room = np.empty(max(2 * len(self._room), self._length, 64), dtype=np.int64)
            room[:start] = self._room[:start]
            self._room = room
        self._room[start : self._length] = values


class SequenceState:
    """One sequence on one rank, from `Step.started` to `Step.finished`.

    Raises:
        ValueError: the prompt's placeholders do not match its media.
    """

    def __init__(self, new: NewSequence, config: ModelConfig) -> None:
        self.request_id = new.request_id
        self.recipe = Recipe.of(new.sampling)
        self.media = new.media
        self.tokens = IntBuffer(new.prompt_token_ids)
        self.prompt_length = len(new.prompt_token_ids)
        self.blocks = IntBuffer()
        images, videos = _of(new.media, "image"), _of(new.media, "video")
        seconds = [1.0 if v.second_per_grid is None else v.second_per_grid for v in videos]
        placed = mrope_positions(
            new.prompt_token_ids, [i.grid_thw for i in images], [v.grid_thw for v in videos], seconds, config
        )
        self._positions = placed.positions.numpy()
        # What a token past the prompt adds to its index to get its position, the same on all three axes.
        self._shift = placed.next_position - self.prompt_length

    def take_blocks(self, chunk: Chunk, block_size: int) -> list[int]:
        """Put the chunk's blocks into the table: after those that are there, or in their place if it restarts.

        Returns those of them that the chunk leaves partly or wholly unwritten. Blocks that hold tokens before the
        chunk, computed by whichever sequence, are never among these.
        """
        first = 0 if chunk.restart else len(self.blocks)
        self.blocks.extend_at(first, chunk.block_ids)
        filled, computed = (chunk.start + chunk.num_tokens) // block_size, -(-chunk.start // block_size)
        return chunk.block_ids[max(0, filled - first, computed - first) :]

    def position(self, index: int) -> int:
        """Position of a token past the prompt."""
        return index + self._shift

    def positions(self, start: int, stop: int) -> np.ndarray:
        """int64 `[3, stop - start]` of the tokens `start .. stop`, in the prompt or past it."""
        prompt = self._positions[:, start : min(stop, self.prompt_length)]
        if stop <= self.prompt_length:
            return prompt
        later = np.arange(max(start, self.prompt_length), stop) + self._shift
        return np.concatenate((prompt, np.broadcast_to(later, (3, len(later)))), axis=1)

    def embeddings_within(self, start: int, stop: int, encoded: Mapping[bytes, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(first token, rows) for each piece of a media item among the tokens `start .. stop`.

        `encoded`: embeddings `[num_tokens, row_size]` of whole items by media hash.

        Raises:
            RuntimeError: an item is not there that one of these tokens needs.
        """
        for index, item in enumerate(self.media):
            for run, offset in enumerate(item.offsets):
                first, last = max(start, offset), min(stop, offset + item.run_length)
                if first >= last:
                    continue
                rows = encoded.get(item.media_hash)
                if rows is None:
                    raise RuntimeError(f"{self.request_id}: item {index} is needed at token {first} but not encoded")
                before = offset - run * item.run_length  # tokens of the prompt that are none of the item's
                yield first, rows[first - before : last - before]


def _of(media: Sequence[MediaItem], modality: str) -> list[MediaItem]:
    return [item for item in media if item.modality == modality]
