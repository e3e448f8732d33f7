"""What a rank keeps of each sequence between steps: tokens, positions, block table, media embeddings.

The engine core never sends a sampled token back, so a sequence's tokens live here; every rank keeps the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from mini_engine.messages import MediaItem, NewSequence
from mini_engine.model.config import ModelConfig
from mini_engine.model.rope import mrope_positions


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
        self.sampling = new.sampling
        self.media = new.media
        self.tokens = IntBuffer(new.prompt_token_ids)
        self.prompt_length = len(new.prompt_token_ids)
        self.blocks = IntBuffer()
        self.embeddings: list[Tensor | None] = [None] * len(new.media)
        images, videos = _of(new.media, "image"), _of(new.media, "video")
        seconds = [1.0 if v.second_per_grid is None else v.second_per_grid for v in videos]
        placed = mrope_positions(
            new.prompt_token_ids, [i.grid_thw for i in images], [v.grid_thw for v in videos], seconds, config
        )
        self._positions = placed.positions.numpy()
        # What a token past the prompt adds to its index to get its position, the same on all three axes.
        self._shift = placed.next_position - self.prompt_length

    def add_blocks(self, start: int, count: int, added: Sequence[int], block_size: int) -> list[int]:
        """Take the blocks that come with the chunk `start .. start + count`; with `start` 0 the table begins anew.

        Returns those of them that the chunk leaves partly or wholly unwritten, without blocks that hold earlier tokens.
        """
        first = len(self.blocks) if start else 0
        self.blocks.extend_at(first, added)
        filled = (start + count) // block_size
        return [block for i, block in enumerate(added, first) if i >= filled and i * block_size >= start]

    def set_sampled(self, index: int, token: int) -> None:
        """The token at `index` is `token`; later ones, from before a restart, are gone."""
        self.tokens.extend_at(index, [token])

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

    def embeddings_within(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(first token, rows) for each piece of a media item among the tokens `start .. stop`.

        Raises:
            RuntimeError: an item was not encoded before the chunk that needs it.
        """
        for index, item in enumerate(self.media):
            first, last = max(start, item.offset), min(stop, item.offset + item.num_tokens)
            if first < last:
                rows = self.embeddings[index]
                if rows is None:
                    raise RuntimeError(f"{self.request_id}: item {index} is needed at token {first} but not encoded")
                yield first, rows[first - item.offset : last - item.offset]


def _of(media: Sequence[MediaItem], modality: str) -> list[MediaItem]:
    return [item for item in media if item.modality == modality]
