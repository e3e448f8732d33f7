"""Media of noise, and what the model's own processor makes of them in its full call: the reference."""

from typing import Any

import numpy as np
import torch

from mini_engine.media.frame_sampling import VideoFacts, VideoSampling
from mini_engine.media.processor import MediaProcessor, ProcessedItem
from mini_engine.worker.normalisation import Normalisation
from tests.support.decoding import Video

TEN_HZ = np.arange(60) / 10


def decoded(count: int, height: int, width: int, times: Any = TEN_HZ, **sampling: Any) -> Video:
    """A video of noise: of frames at `times`, those that a sampling keeps, by default `count` frames."""
    kept = VideoSampling(**sampling or {"num_frames": count})
    fps = (len(times) - 1) / (times[-1] - times[0])
    indices = kept.indices(times, fps, 768)
    pixels = np.random.default_rng(count).integers(0, 256, (len(indices), height, width, 3), dtype=np.uint8)
    timestamps = np.asarray(times)[indices].tolist()
    return Video(pixels, VideoFacts(timestamps, fps, len(times), len(kept.window(times))))


def full_call(processor: MediaProcessor, *items: Video | np.ndarray, text: str = "", **more: Any) -> Any:
    """The model's own processor, called as its documentation says."""
    hf = processor.hf_processor
    videos = [item for item in items if isinstance(item, Video)]
    if videos:
        more |= {"videos": [video.frames for video in videos], "do_sample_frames": False, "video_metadata": []}
    for _, facts in videos:
        duration = facts.total_frames / facts.fps
        frames = {"total_num_frames": facts.window_frames, "fps": facts.fps, "duration": duration}
        indices = np.rint(np.array(facts.timestamps) * facts.fps).astype(int).tolist()
        more["video_metadata"].append({**frames, "frames_indices": indices})
    if images := [item for item in items if isinstance(item, np.ndarray)]:
        more["images"] = images
    more |= {"input_data_format": "channels_last", "return_tensors": "pt"}
    return hf(text=[text or (hf.video_token if videos else hf.image_token)], **more)


def assert_same(processor: MediaProcessor, item: ProcessedItem, expected: Any) -> None:
    """The worker's normalisation of the patches gives the expected pixels."""
    name, half = ("pixel_values_videos", "video") if item.facts.modality == "video" else ("pixel_values", "image")
    own = getattr(processor.hf_processor, f"{half}_processor")
    assert item.patches.dtype == torch.uint8 and item.patches.is_contiguous()
    assert item.facts.grid_thw == tuple(expected[f"{half}_grid_thw"][0].tolist())
    assert item.facts.num_tokens == (expected["input_ids"] == getattr(processor.hf_processor, f"{half}_token_id")).sum()
    normalise = Normalisation(tuple(own.image_mean), tuple(own.image_std), own.rescale_factor)
    exact, narrow = (normalise(item.patches, dtype) for dtype in (torch.float32, torch.half))
    torch.testing.assert_close(exact, expected[name], atol=1e-6, rtol=0)
    assert torch.equal(exact.half(), narrow)
