"""`normalise_patches` against the Hugging Face processors, and the order of values within a patch."""

import pytest
import torch
from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from mini_engine.model.normalise import normalise_patches

RAW = {"do_rescale": False, "do_normalize": False}
SETTINGS = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 100_000}}


def frames(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def test_a_video_equals_the_processor():
    processor, video = Qwen2VLVideoProcessor(**SETTINGS), frames(5, 3, 30, 45)
    whole = processor(video, cap_pixels_per_frame=False, return_tensors="pt")
    raw = processor(video, cap_pixels_per_frame=False, return_tensors="pt", **RAW)
    assert torch.equal(raw["video_grid_thw"], whole["video_grid_thw"])
    patches = raw["pixel_values_videos"]
    assert patches.dtype == torch.uint8
    ours = normalise_patches(
        patches, processor.image_mean, processor.image_std, processor.rescale_factor, torch.float32
    )
    torch.testing.assert_close(ours, whole["pixel_values_videos"], atol=1e-6, rtol=0)


def test_an_image_equals_the_processor():
    processor, image = Qwen2VLImageProcessor(**SETTINGS), frames(3, 33, 20)
    whole = processor(image, return_tensors="pt")["pixel_values"]
    raw = processor(image, return_tensors="pt", **RAW)["pixel_values"].to(torch.uint8)
    ours = normalise_patches(raw, processor.image_mean, processor.image_std, processor.rescale_factor, torch.float32)
    torch.testing.assert_close(ours, whole, atol=1e-6, rtol=0)


def test_rows_are_channel_frame_row_column():
    """Patches follow merge units row by row, and within a row the channel is outermost: what the tower assumes."""
    video = frames(2, 3, 16, 24)
    processor = Qwen2VLVideoProcessor(**SETTINGS)
    raw = processor(video, cap_pixels_per_frame=False, do_resize=False, return_tensors="pt", **RAW)
    assert raw["video_grid_thw"].tolist() == [[1, 4, 6]]
    expected = []
    for unit in range(2 * 3):
        for corner in range(4):
            top, left = 4 * (unit // 3 * 2 + corner // 2), 4 * (unit % 3 * 2 + corner % 2)
            expected.append(video[:, :, top : top + 4, left : left + 4].transpose(0, 1).flatten())
    assert torch.equal(raw["pixel_values_videos"], torch.stack(expected))


def test_other_dtypes_are_rounded_from_float32():
    patches = frames(4, 3 * 32)
    exact, narrow = (normalise_patches(patches, [0.5] * 3, [0.2] * 3, 1 / 255, d) for d in (torch.float32, torch.half))
    assert torch.equal(exact.half(), narrow)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="must be uint8"):
        normalise_patches(torch.zeros(1, 6), [0.0] * 3, [1.0] * 3, 1.0, torch.float32)
    with pytest.raises(ValueError, match="do not fit 3 means"):
        normalise_patches(frames(1, 7), [0.0] * 3, [1.0] * 3, 1.0, torch.float32)
