"""`normalise_patches` against the Hugging Face processors."""

import pytest
import torch
from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from mini_engine.model.normalise import normalise_patches

SETTINGS = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 100_000}}


def frames(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("kind", "shape", "key"),
    [
        (Qwen2VLVideoProcessor, (5, 3, 30, 45), "pixel_values_videos"),
        (Qwen2VLImageProcessor, (3, 33, 20), "pixel_values"),
    ],
)
def test_patches_equal_the_processors(kind, shape, key):
    processor, pixels = kind(**SETTINGS), frames(*shape)
    whole = processor(pixels, return_tensors="pt")[key]
    raw = processor(pixels, return_tensors="pt", do_rescale=False, do_normalize=False)[key].to(torch.uint8)
    ours = normalise_patches(raw, processor.image_mean, processor.image_std, processor.rescale_factor, torch.float32)
    torch.testing.assert_close(ours, whole, atol=1e-6, rtol=0)


def test_other_dtypes_are_rounded_from_float32():
    patches = frames(4, 3 * 32)
    exact, narrow = (normalise_patches(patches, [0.5] * 3, [0.2] * 3, 1 / 255, d) for d in (torch.float32, torch.half))
    assert torch.equal(exact.half(), narrow)
