"""Other ways of prompts through a model: in pieces, as a scheduler cuts them, and in other dtypes."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mini_engine.model.rope import PromptPositions, mrope_positions
from mini_engine.model.vision_language import VisionLanguageModel
from tests.model.reference import Prompt, ReferenceAttention, media_at


def chunked_logits(
    model: VisionLanguageModel, prompts: Sequence[Prompt], size: int, attend: ReferenceAttention | None = None
) -> list[Tensor]:
    """As `reference_logits`, but each step takes the next `size` tokens of every prompt that has any left."""
    attend = attend or ReferenceAttention()
    for_media = torch.tensor([model.config.image_token_id, model.config.video_token_id])
    rows, positions = [media_rows(model, each) for each in prompts], [place(model, each).positions for each in prompts]
    outputs: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(len(each.token_ids) for each in prompts), size):
        stop = start + size
        left = [i for i, each in enumerate(prompts) if start < len(each.token_ids)]
        counts = [len(prompts[i].token_ids[start:stop]) for i in left]
        tokens = torch.cat([torch.as_tensor(prompts[i].token_ids[start:stop]) for i in left])
        places = torch.nonzero(torch.isin(tokens, for_media)).flatten()
        media = media_at(places, torch.cat([rows[i][start:stop] for i in left])[places])
        step = attend.step(list(zip(left, counts, strict=True)))
        axes = torch.cat([positions[i][:, start:stop] for i in left], dim=1)
        logits = model.logits(model(model.embed(tokens, media), axes, step, media))
        for i, part in zip(left, logits.split(counts), strict=True):
            outputs[i].append(part)
    return [torch.cat(parts) for parts in outputs]


def place(model: VisionLanguageModel, prompt: Prompt) -> PromptPositions:
    """Where the prompt's tokens stand."""
    images, videos = ([grid for _, grid in items] for items in (prompt.images, prompt.videos))
    return mrope_positions(prompt.token_ids, images, videos, prompt.seconds, model.config)


def media_rows(model: VisionLanguageModel, prompt: Prompt) -> Tensor:
    """`[tokens, row_size]`: the vision tower's row of each placeholder, zeros for other tokens."""
    config, ids = model.config, torch.as_tensor(prompt.token_ids)
    dtype = next(model.parameters()).dtype
    rows = torch.zeros(len(ids), config.vision.row_size, dtype=dtype)
    for token, items in ((config.image_token_id, prompt.images), (config.video_token_id, prompt.videos)):
        if items:
            patches = torch.cat([patches for patches, _ in items])
            rows[ids == token] = torch.cat(model.encode_vision(patches, [grid for _, grid in items]))
    return rows


def in_dtype(prompt: Prompt, dtype: torch.dtype) -> Prompt:
    """The prompt for a model of that dtype."""
    images, videos = ([(patches.to(dtype), grid) for patches, grid in each] for each in (prompt.images, prompt.videos))
    return replace(prompt, images=images, videos=videos)
