"""The bundled model on rendered media: logits and greedy words equal to transformers'."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from mini_engine.demo import evaluate, videos
from mini_engine.demo.model import WEIGHTS
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.rope import mrope_positions
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model
from tests.model.reference import Prompt, ReferenceAttention, reference_logits
from tests.oracle import exact_seconds

SEED = 2_000_000_000  # beyond what training and its evaluation draw from
DECODED = 24


@dataclass(frozen=True)
class Bundled:
    ours: VisionLanguageModel
    theirs: Any
    processor: Any


@pytest.fixture(scope="module")
def bundled() -> Bundled:
    ours = load_model(WEIGHTS, TensorParallel(), torch.float32, torch.device("cpu"))
    theirs = AutoModelForImageTextToText.from_pretrained(WEIGHTS, dtype=torch.float32).eval()
    return Bundled(ours, theirs, AutoProcessor.from_pretrained(WEIGHTS))


def media(kind: str) -> list[evaluate.Media]:
    clip, picture = videos.render(SEED, num_frames=24, fps=12), videos.render_image(SEED + 1)
    video = evaluate.Media(clip.colour, clip.shape, clip.motion, clip.frames, 12.0)
    image = evaluate.Media(picture.colour, picture.shape, None, picture.pixels[None])
    return {"text": [], "image": [image], "video": [video], "image, video": [image, video]}[kind]


def to_prompt(inputs: Any) -> Prompt:
    """A processor's output as the reference takes it."""

    def items(patches: str, grids: str) -> list[tuple[torch.Tensor, Any]]:
        if patches not in inputs:
            return []
        sizes = [tuple(grid) for grid in inputs[grids].tolist()]
        return list(zip(inputs[patches].split([t * h * w for t, h, w in sizes]), sizes, strict=True))

    return Prompt(
        inputs["input_ids"][0].tolist(),
        items("pixel_values", "image_grid_thw"),
        items("pixel_values_videos", "video_grid_thw"),
        torch.as_tensor(inputs.get("second_per_grid_ts", [])).tolist(),
    )


def greedy(model: VisionLanguageModel, prompt: Prompt, ends: Sequence[int]) -> list[int]:
    """At most `DECODED` tokens, the one out of `ends` included, one step each."""
    grids = [[grid for _, grid in items] for items in (prompt.images, prompt.videos)]
    attend = ReferenceAttention()
    following = mrope_positions(prompt.token_ids, *grids, prompt.seconds, model.config).next_position
    tokens = [int(reference_logits(model, [prompt], attend)[0][-1].argmax())]
    while tokens[-1] not in ends and len(tokens) < DECODED:
        axes = torch.full((3, 1), following + len(tokens) - 1)
        hidden = model(model.embed(torch.tensor(tokens[-1:])), axes, attend.step([(0, 1)]))
        tokens.append(int(model.logits(hidden)[0].argmax()))
    return tokens


@pytest.mark.parametrize(
    "kind",
    ["text", "image", pytest.param("video", marks=exact_seconds), pytest.param("image, video", marks=exact_seconds)],
)
@torch.inference_mode()
def test_the_bundled_model_equals_transformers(kind, bundled):
    inputs = evaluate.processed(bundled.processor, media(kind), "Describe what you see.")
    prompt = to_prompt(inputs)
    expected = bundled.theirs(**inputs).logits[0]
    # Trained logits reach 20, where neighbouring float32 numbers are 2e-6 apart: the bound is relative to the largest.
    difference = (reference_logits(bundled.ours, [prompt])[0] - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()
    generated = bundled.theirs.generate(**inputs, max_new_tokens=DECODED, do_sample=False, top_k=None)
    words = generated[0, len(prompt.token_ids) :].tolist()
    assert greedy(bundled.ours, prompt, bundled.theirs.generation_config.eos_token_id) == words
