"""A prompt's media as the engine takes them: whether they fit, and where they stand. Knows nothing of how they were
made."""

from __future__ import annotations

from collections.abc import Sequence

from mini_engine.api.chat import ExpandedPrompt
from mini_engine.api.errors import bad_request
from mini_engine.api.media_loader import LoadedItem
from mini_engine.messages import EngineLimits, MediaItem


def check_budget(items: Sequence[LoadedItem], limits: EngineLimits) -> None:
    """Refuse what no encoder cache could hold. An item that comes twice counts once.

    Raises:
        ApiError: 400 that says how much would be needed, and which flag raises the limit.
    """
    needed = sum({item.media_hash: item.processed.num_tokens for item in items}.values())
    if needed > limits.max_prompt_media_tokens:
        raise bad_request(
            f"The images and videos of this prompt have {needed} tokens together; this server takes at most "
            f"{limits.max_prompt_media_tokens} in one prompt. Send fewer or smaller ones, or start the server with "
            f"--encoder-cache-tokens {needed}.",
            "messages",
            "media_too_large",
        )


def place(prompt: ExpandedPrompt, items: Sequence[LoadedItem]) -> list[MediaItem]:
    """The items with their places in the prompt."""
    return [
        MediaItem(
            item.processed.modality,
            placed.offset,
            placed.length,
            item.processed.grid_thw,
            item.processed.second_per_grid,
            item.processed.patches,
            item.media_hash,
        )
        for placed, item in zip(prompt.items, items, strict=True)
    ]
