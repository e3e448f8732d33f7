"""A tiny random checkpoint of any family, requests with text, images and videos, and what transformers makes of it."""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_engine.messages import MediaItem, MessageId, NewSequence, SamplingParams, TensorHandle
from mini_engine.transport.arena import ReadableMemory
from mini_engine.worker.normalisation import Normalisation
from tests.support import families
from tests.support.families import IMAGE, PATCH_DIM, VIDEO, placeholders

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]


def build(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """Write the checkpoint's directory."""
    families.build(family, deviation=0.15).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return folder


class MemoryMedia:
    """Stands where `MediaInputs` stands; keeps the calls."""

    def __init__(self) -> None:
        self.tensors: dict[MessageId, Tensor] = {}
        self.dropped: list[int] = []
        self.store: ReadableMemory | None = None

    def check(self) -> None:
        pass

    def put(self, patches: Tensor) -> TensorHandle:
        message = MessageId(7, len(self.tensors) + 1)
        self.tensors[message] = patches
        return TensorHandle(message, tuple(patches.shape), "uint8")

    def tensor(self, handle: TensorHandle) -> Tensor:
        return self.tensors[handle.message]

    def rows(self, handle: TensorHandle, first: int, stop: int) -> Tensor:
        return self.tensors[handle.message][first:stop]

    def release(self, messages: Iterable[MessageId]) -> None:
        for message in messages:
            del self.tensors[message]

    def drop_sender(self, incarnation: int) -> None:
        self.dropped.append(incarnation)


def make_request(
    media: MemoryMedia,
    request_id: str,
    pieces: Sequence[int | tuple[int, ...]],
    family: str = "qwen2_5_vl",
    **sampling: Any,
) -> NewSequence:
    """`pieces` are token ids and grids (t, h, w): an image when t is 1, else a video of one second per grid step."""
    tokens: list[int] = []
    items: list[MediaItem] = []
    generator = torch.Generator().manual_seed(sum(map(ord, request_id)))
    for piece in pieces:
        if isinstance(piece, int):
            tokens.append(piece)
            continue
        t, h, w = piece
        token = VIDEO if t > 1 else IMAGE
        patches = torch.randint(0, 256, (t * h * w, PATCH_DIM), generator=generator, dtype=torch.uint8)
        written = placeholders(family, token, (t, h, w))
        starts = [at for at, each in enumerate(written) if each == token and written[at - 1] != token]
        items.append(
            MediaItem(
                modality="video" if t > 1 else "image",
                offsets=[len(tokens) + start for start in starts],
                num_tokens=t * h * w // 4,
                grid_thw=(t, h, w),
                second_per_grid=1.0 if t > 1 else None,
                patches=media.put(patches),
                media_hash=hashlib.blake2b(patches.numpy().tobytes(), digest_size=16).digest(),
            )
        )
        tokens += written
    params = {"max_tokens": 1 << 20, "seed": 0, "temperature": 0.0} | sampling
    return NewSequence(request_id, tokens, SamplingParams(**params), items)


def mixed_requests(media: MemoryMedia, family: str = "qwen2_5_vl", **sampling: Any) -> list[NewSequence]:
    """Text, image, video, several items of both kinds, and prompts around a block's length."""
    shapes: dict[str, list[int | tuple[int, ...]]] = {
        "text": list(range(3, 60)),
        "image": [5, (1, 6, 10), 7, 8],
        "video": [5, (3, 14, 4), 9, 11],
        "two": [4, (9, 4, 6), 12, (1, 4, 4), 6, 7],
        "short": [17],
        "block": list(range(20, 36)),
    }
    return [make_request(media, name, pieces, family, **sampling) for name, pieces in shapes.items()]


@functools.lru_cache(maxsize=1)
def load_oracle(folder: Path) -> Any:
    """transformers' own model; the last one stays, since a test asks it about many requests."""
    # Here: the ranks that share this file need no transformers, which takes seconds to import.
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def oracle(folder: Path, media: MemoryMedia, request: NewSequence) -> tuple[Any, dict[str, Any]]:
    """transformers' own model, and its arguments for the request."""
    model = load_oracle(folder)
    model.model.rope_deltas = None  # of the request before
    normalise = Normalisation.from_dir(folder)
    ids, items = torch.tensor([request.prompt_token_ids]), {"image": [], "video": []}
    for item in request.media:
        items[item.modality].append((normalise(media.tensor(item.patches), torch.float32), item.grid_thw))
    inputs = families.oracle_inputs(model.config, ids, items["image"], items["video"], [1.0] * len(items["video"]))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}


def generate(folder: Path, media: MemoryMedia, request: NewSequence, count: int, **more: Any) -> list[int]:
    """The greedy continuation by transformers' own `generate`, which gets `more`."""
    model, inputs = oracle(folder, media, request)
    output = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0, **more)
    return output[0, len(request.prompt_token_ids) :].tolist()


@torch.no_grad()
def pool(folder: Path, media: MemoryMedia, request: NewSequence) -> Tensor:
    """By transformers: the last token's hidden state, or the logits of some tokens."""
    model, inputs = oracle(folder, media, request)
    state = model.model(**inputs).last_hidden_state[0, -1]
    assert request.pooling is not None
    return model.lm_head(state)[request.pooling.token_ids] if request.pooling.token_ids else state
