"""Requests with text, images and videos for the tiny models of `families.py`, and what transformers makes of them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from mini_engine.messages import MediaItem, MessageId, NewSequence, SamplingParams, TensorHandle
from mini_engine.transport.arena import ReadableMemory
from mini_engine.worker.normalisation import Normalisation
from tests.support.families import IMAGE, PATCH_DIM, VIDEO, placeholders

NORMALISE = Normalisation((0.4, 0.5, 0.6), (0.3, 0.4, 0.5))
FOLLOWING = 21  # the token after a prompt, where it may not be a placeholder by chance
Pieces = Sequence[int | tuple[float, ...]]  # see `make_request`
SHAPES: dict[str, Pieces] = {
    "text": range(3, 60),
    "image": [5, (1, 6, 10), 7, 8],
    "video": [5, (3, 14, 4), 9, 11],
    "two": [4, (9, 4, 6), 12, (1, 4, 4), 6, 7],
    "short": [17],
    "block": range(20, 36),
}
ORDERS: dict[str, Pieces] = {
    "two videos": [(9, 4, 6, 2.0), 17, (3, 14, 4), 17, 11],
    "video then images": [(3, 14, 4), 17, (1, 4, 4), 17, (1, 6, 10), 17, 12, 13],
    "image then video": [4, (1, 4, 4), 17, (9, 4, 6, 3.0), 17, 6],
}


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
        return TensorHandle(message, tuple(patches.shape))

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
    media: MemoryMedia, request_id: str, pieces: Pieces, family: str = "qwen2_5_vl", **sampling: Any
) -> NewSequence:
    """`pieces` are token ids and grids: (1, h, w) of an image; (t, h, w) of a video, whose grid steps take a second, or
    (t, h, w, seconds)."""
    tokens: list[int] = []
    items: list[MediaItem] = []
    generator = torch.Generator().manual_seed(sum(map(ord, request_id)))
    for piece in pieces:
        if isinstance(piece, int):
            tokens.append(piece)
            continue
        (t, h, w), seconds = map(int, piece[:3]), piece[3:]
        is_video = t > 1 or bool(seconds)
        token = VIDEO if is_video else IMAGE
        patches = torch.randint(0, 256, (t * h * w, PATCH_DIM), generator=generator, dtype=torch.uint8)
        written = placeholders(family, token, (t, h, w))
        starts = [at for at, each in enumerate(written) if each == token and written[at - 1] != token]
        items.append(
            MediaItem(
                modality="video" if is_video else "image",
                offsets=[len(tokens) + start for start in starts],
                num_tokens=t * h * w // 4,
                grid_thw=(t, h, w),
                second_per_grid=[*seconds, 1.0][0] if is_video else None,
                patches=media.put(patches),
                media_hash=hashlib.blake2b(patches.numpy().tobytes(), digest_size=16).digest(),
            )
        )
        tokens += written
    params = {"max_tokens": 1 << 20, "seed": 0, "temperature": 0.0} | sampling
    return NewSequence(request_id, tokens, SamplingParams(**params), items)


def mixed_requests(
    media: MemoryMedia, family: str = "qwen2_5_vl", names: Iterable[str] = SHAPES, **sampling: Any
) -> list[NewSequence]:
    """Text, image, video, several items of both kinds, and prompts around a block's length."""
    return [make_request(media, name, (SHAPES | ORDERS)[name], family, **sampling) for name in names]


def inputs_of(oracle: Any, media: MemoryMedia, request: NewSequence) -> dict[str, Any]:
    """The arguments of transformers' own model for the request."""
    oracle.model.rope_deltas = None  # of the request before
    ids = torch.tensor([request.prompt_token_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    for modality, values in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if items := [item for item in request.media if item.modality == modality]:
            inputs[values] = NORMALISE(torch.cat([media.tensor(item.patches) for item in items]), torch.float32)
            inputs[f"{modality}_grid_thw"] = torch.tensor([item.grid_thw for item in items])
            if modality == "video" and oracle.config.model_type == "qwen2_5_vl":
                inputs["second_per_grid_ts"] = torch.tensor([item.second_per_grid for item in items])
    return inputs


def generate(oracle: Any, media: MemoryMedia, request: NewSequence, count: int, **more: Any) -> list[int]:
    """The greedy continuation by transformers' own `generate`, which gets `more`."""
    inputs = inputs_of(oracle, media, request)
    output = oracle.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0, **more)
    return output[0, len(request.prompt_token_ids) :].tolist()


@torch.no_grad()
def pool(oracle: Any, media: MemoryMedia, request: NewSequence) -> Tensor:
    """By transformers: the last token's hidden state, or the logits of some tokens."""
    state = oracle.model(**inputs_of(oracle, media, request)).last_hidden_state[0, -1]
    assert request.pooling is not None
    return oracle.lm_head(state)[request.pooling.token_ids] if request.pooling.token_ids else state


@torch.no_grad()
def logits(oracle: Any, family: str, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By transformers, of the tokens of which `script.logits` has found them."""
    media, expected = MemoryMedia(), {}
    for new in mixed_requests(media, family, found):
        following = [FOLLOWING] * (len(found[new.request_id]) - len(new.prompt_token_ids))
        whole = replace(new, prompt_token_ids=[*new.prompt_token_ids, *following])
        expected[new.request_id] = oracle(**inputs_of(oracle, media, whole), use_cache=False).logits[0]
    return expected


def assert_logits(found: Mapping[str, Tensor], oracle: Any, family: str) -> None:
    """They are transformers'."""
    for name, expected in logits(oracle, family, found).items():
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=0, msg=f"{name}: {{}}".format)
