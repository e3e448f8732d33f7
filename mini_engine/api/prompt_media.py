"""A prompt's media as the engine takes them: whether they fit, and where they stand. Knows nothing of how they were
made, nor which engine keeps what."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from mini_engine.api.chat import ExpandedPrompt, Placeholder
from mini_engine.api.errors import bad_request
from mini_engine.api.responses import MediaUsage
from mini_engine.media.hashing import HASH_BYTES
from mini_engine.messages import CachedMedia, EngineLimits, MediaItem, Modality

if TYPE_CHECKING:
    import torch

    from mini_engine.media.processor import MediaProcessor, ProcessedItem


@dataclass(frozen=True, eq=False)
class PromptItem:
    """One item of a prompt; see `MediaItem`. `patches` is None where the engine's ranks keep them under the hash.

    `missing` is set where not all of the item could be read; its hash is then like no other.
    """

    modality: Modality
    media_hash: bytes
    num_tokens: int
    grid_thw: tuple[int, int, int]
    second_per_grid: float | None
    patches: torch.Tensor | None
    missing: str | None
    placeholder: str | None

    @classmethod
    def of(cls, media_hash: bytes, source: ProcessedItem | CachedMedia) -> PromptItem:
        """The item as it was just processed, or as the engine keeps it."""
        patches, missing = (None, None) if isinstance(source, CachedMedia) else (source.patches, source.missing)
        if missing is not None:
            # A hit is not decoded, so it could not say what is missing: nobody may find this one.
            media_hash = os.urandom(HASH_BYTES)
        return cls(
            source.modality,
            media_hash,
            source.num_tokens,
            source.grid_thw,
            source.second_per_grid,
            patches,
            missing,
            source.placeholder,
        )

    def usage(self, processor: MediaProcessor) -> MediaUsage:
        """What the response says of it."""
        steps, height, width = self.grid_thw
        used = MediaUsage(self.modality, width * processor.patch_size, height * processor.patch_size, self.num_tokens)
        if self.second_per_grid is None:
            return used
        seconds = round(self.second_per_grid / processor.step, 4)
        return msgspec.structs.replace(used, frames=steps * processor.step, seconds_per_frame=seconds)


def prompt_items(
    hashes: Sequence[bytes], processed: Mapping[bytes, ProcessedItem], kept: Mapping[bytes, CachedMedia]
) -> list[PromptItem]:
    """The items with these hashes in order, equal ones the same; each is in `processed`, or else in `kept`."""
    items = {digest: PromptItem.of(digest, processed.get(digest) or kept[digest]) for digest in set(hashes)}
    return [items[digest] for digest in hashes]


def check_budget(items: Sequence[PromptItem], limits: EngineLimits) -> None:
    """Refuse what no encoder cache could hold. An item that comes twice counts once.

    Raises:
        ApiError: 400 that says how much would be needed, and which flag raises the limit.
    """
    needed = sum({item.media_hash: item.num_tokens for item in items}.values())
    if needed > limits.max_prompt_media_tokens:
        raise bad_request(
            f"The images and videos of this prompt have {needed} tokens together; this server takes at most "
            f"{limits.max_prompt_media_tokens} in one prompt. Send fewer or smaller ones, or start the server with "
            f"--encoder-cache-tokens {needed}.",
            "messages",
            "media_too_large",
        )


def placeholders(items: Sequence[PromptItem]) -> list[Placeholder]:
    """What is to stand for the items in the prompt."""
    return [Placeholder(item.modality, item.num_tokens, item.placeholder) for item in items]


def place(prompt: ExpandedPrompt, items: Sequence[PromptItem]) -> list[MediaItem]:
    """The items with their places in the prompt."""
    return [
        MediaItem(
            item.modality,
            placed.offset,
            placed.length,
            item.grid_thw,
            item.second_per_grid,
            item.patches,
            item.media_hash,
            more_offsets=placed.more_offsets,
            placeholder=item.placeholder,
            cacheable=item.missing is None,
        )
        for placed, item in zip(prompt.items, items, strict=True)
    ]
