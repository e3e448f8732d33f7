import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mini_engine import metrics
from mini_engine.media.errors import MediaError
from mini_engine.media.processor import MediaProcessor, ProcessedItem
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import DecodedVideo, decode_video
from tests.media import clips

SIZES = [(48, 64), (90, 62), (300, 40), (224, 224)]


def decoded(frames: int, height: int, width: int, fps: float = 10.0, total: int | None = None) -> DecodedVideo:
    pixels = np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    total = total or frames
    indices = np.linspace(0, total - 1, frames).astype(int)
    return DecodedVideo(pixels, indices, indices / fps, fps, total, total)


def normalised(processor: MediaProcessor, item: ProcessedItem) -> torch.Tensor:
    """What the worker does to the patches: channel by channel, `(x * rescale_factor - mean) / std`."""
    patches = item.patches.double().view(len(item.patches), 3, -1)
    half = processor.hf_processor.image_processor
    mean = torch.tensor(half.image_mean).double().view(1, 3, 1)
    std = torch.tensor(half.image_std).double().view(1, 3, 1)
    return ((patches * half.rescale_factor - mean) / std).view(len(item.patches), -1)


def full_call(processor: MediaProcessor, video: DecodedVideo | None = None, image: np.ndarray | None = None, **kwargs):
    """The model's own processor, called as its documentation says."""
    text = processor.hf_processor.image_token if image is not None else processor.hf_processor.video_token
    if video is not None:
        kwargs |= {
            "videos": [video.frames],
            "do_sample_frames": False,
            "video_metadata": [
                {
                    "total_num_frames": video.total_frames,
                    "fps": video.fps,
                    "frames_indices": video.frames_indices.tolist(),
                    "duration": video.duration,
                }
            ],
        }
    if image is not None:
        kwargs |= {"images": [image]}
    return processor.hf_processor(text=[text], return_tensors="pt", **kwargs)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("frames", [1, 2, 5, 8])
def test_video_equals_the_processors_own(processor: MediaProcessor, frames: int, height: int, width: int) -> None:
    video = decoded(frames, height, width, fps=29.97, total=frames * 3)
    item = processor.process_video(video)
    expected = full_call(processor, video)
    assert item.patches.dtype == torch.uint8
    assert item.patches.is_contiguous()
    assert item.grid_thw == tuple(expected["video_grid_thw"][0].tolist())
    assert torch.tensor(item.second_per_grid) == expected["second_per_grid_ts"][0]
    assert item.num_tokens == (expected["input_ids"] == processor.hf_processor.video_token_id).sum()
    torch.testing.assert_close(normalised(processor, item), expected["pixel_values_videos"].double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("height", "width"), [*SIZES, (1, 3), (3, 40)])
def test_image_equals_the_processors_own(processor: MediaProcessor, height: int, width: int) -> None:
    image = decoded(1, height, width).frames[0]
    item = processor.process_image(image)
    expected = full_call(processor, image=image, input_data_format="channels_last")
    assert item.patches.dtype == torch.uint8
    assert item.patches.is_contiguous()
    assert item.grid_thw == tuple(expected["image_grid_thw"][0].tolist())
    assert item.second_per_grid is None
    assert item.num_tokens == (expected["input_ids"] == processor.hf_processor.image_token_id).sum()
    torch.testing.assert_close(normalised(processor, item), expected["pixel_values"].double(), atol=1e-6, rtol=0)


def test_seconds_per_grid_of_a_sampled_file(processor: MediaProcessor) -> None:
    video = decode_video(clips.encode(30, rate=10), VideoSampling(num_frames=6))
    # 3 s in 6 frames, 2 to a grid step.
    assert processor.process_video(video).second_per_grid == pytest.approx(1.0)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"size": {"shortest_edge": 784, "longest_edge": 4 * 784}},
        {"min_pixels": 12 * 784},
        {"max_pixels": 4 * 784},
        {"min_pixels": 784, "max_pixels": 6 * 784},
    ],
)
def test_kwargs_apply_to_images_and_videos(model_dir: Path, kwargs: dict) -> None:
    tuned = MediaProcessor(model_dir, mm_processor_kwargs=kwargs)
    own = MediaProcessor(model_dir)
    video = decoded(4, 60, 100)
    for kind, item in (
        ("image", tuned.process_image(video.frames[0])),
        ("video", tuned.process_video(video)),
    ):
        half = getattr(own.hf_processor, f"{kind}_processor")
        size = kwargs.get("size") or {
            "shortest_edge": kwargs.get("min_pixels", half.size["shortest_edge"]),
            "longest_edge": kwargs.get("max_pixels", half.size["longest_edge"]),
        }
        expected = full_call(own, **({"image": video.frames[0]} if kind == "image" else {"video": video}), size=size)
        assert item.grid_thw == tuple(expected[f"{kind}_grid_thw"][0].tolist())


@pytest.mark.parametrize(
    ("kwargs", "hint"),
    [
        ({"sise": {}}, "has no sise; this model takes size, min_pixels"),
        ({"do_normalize": True}, "has no do_normalize"),
        ({"patch_size": 16}, "has no patch_size"),
        ({"size": {"shortest_edge": 784}}, "fails with --mm-processor-kwargs"),
        ({"size": "large"}, "size must be an object"),
        (
            {"size": {"shortest_edge": 784, "longest_edge": -1}},
            "size.longest_edge must be a whole number",
        ),
        ({"max_pixels": -1}, "max_pixels must be a whole number of at least 1"),
        ({"min_pixels": 0.5}, "min_pixels must be a whole number of at least 1"),
        ({"max_pixels": True}, "max_pixels must be a whole number of at least 1"),
        ({"size": {"shortest_edge": 784, "longest_edge": 7840}, "min_pixels": 784}, "either size or min_pixels"),
        ({"fps": 2, "num_frames": 4}, "exactly one of num_frames and fps"),
    ],
)
def test_bad_kwargs_fail_at_start(model_dir: Path, kwargs: dict, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        MediaProcessor(model_dir, mm_processor_kwargs=kwargs)


def test_the_size_that_an_error_suggests_can_be_used(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="such as {") as caught:
        MediaProcessor(model_dir, mm_processor_kwargs={"size": "large"})
    suggested = json.loads(str(caught.value).partition("such as ")[2])
    tuned = MediaProcessor(model_dir, mm_processor_kwargs={"size": suggested})
    assert tuned.process_image(decoded(1, 1000, 1000).frames[0]).num_tokens == suggested["longest_edge"] // 784


def test_sampling(model_dir: Path, processor: MediaProcessor) -> None:
    assert processor.default_sampling == VideoSampling(num_frames=32)
    assert processor.sampling(None) == VideoSampling(num_frames=32)
    assert processor.sampling({"fps": 1}) == VideoSampling(fps=1.0)
    with pytest.raises(ValueError, match="it takes num_frames, fps, max_frames"):
        processor.sampling({"frames": 1})
    given = MediaProcessor(model_dir, mm_processor_kwargs={"fps": 2})
    assert given.sampling(None) == VideoSampling(fps=2.0)
    with pytest.raises(ValueError, match="both say how videos are sampled"):
        given.sampling({"num_frames": 8})


@pytest.mark.parametrize(
    "asked",
    [
        {"max_pixels": 4 * 784},
        {"size": {"longest_edge": 4 * 784}},
        {"size": {"shortest_edge": 784, "longest_edge": 6 * 784}},
        {"min_pixels": 784},
        {"max_pixels": 784},  # less than the least of the server, which then gives way
    ],
)
def test_a_request_may_ask_for_smaller_items(model_dir: Path, processor: MediaProcessor, asked: dict) -> None:
    settings = processor.narrowed(processor.settings(VideoSampling(fps=1)), {}, asked, 10)
    assert settings.sampling == VideoSampling(fps=1)
    assert settings.processor_kwargs == asked
    given = asked.get("size", asked)
    size = {
        "shortest_edge": given.get(
            "shortest_edge", given.get("min_pixels", min(4 * 784, given.get("max_pixels", 1e9)))
        ),
        "longest_edge": given.get("longest_edge", given.get("max_pixels", 24 * 784)),
    }
    for height, width in SIZES:
        video = decoded(4, height, width)
        expected = full_call(processor, video, size=size)
        item = processor.process_video(video, settings=settings)
        assert item.grid_thw == tuple(expected["video_grid_thw"][0].tolist())
        image = processor.process_image(video.frames[0], settings=settings)
        assert image.num_tokens <= processor.process_image(video.frames[0]).num_tokens
        assert item.num_tokens <= processor.process_video(video).num_tokens


@pytest.mark.parametrize(
    ("io_kwargs", "asked", "hint"),
    [
        ({}, {"max_pixels": 48 * 784 + 1}, "max_pixels is 37633, more than the 37632 of this server's images"),
        ({}, {"max_pixels": 25 * 784}, "max_pixels is 19600, more than the 18816 of this server's videos"),
        ({}, {"min_pixels": 5 * 784}, "min_pixels is 3920, more than the 3136 of this server's images"),
        ({}, {"size": {"longest_edge": 10**9}}, r"size\.longest_edge is 1000000000, more than"),
        ({}, {"size": {"height": 1}}, "size must be an object of shortest_edge and longest_edge"),
        ({}, {"size": 5}, "size must be an object"),
        ({}, {"max_pixels": "9"}, "max_pixels must be a whole number"),
        ({}, {"max_pixels": 0}, "max_pixels must be a whole number of at least 1"),
        ({}, {"max_pixels": 784, "min_pixels": 1568}, "the least number of pixels is more than the greatest"),
        ({}, {"max_pixels": 784, "size": {}}, "either size or min_pixels"),
        ({}, {"cap_pixels_per_frame": 1}, "cap_pixels_per_frame must be true or false"),
        ({}, {"resample": 2}, "has no resample that a request may set, only size, min_pixels"),
        ({}, {"do_normalize": True}, "has no do_normalize"),
        ({"num_frames": 4}, {"fps": 1}, "both say how videos are sampled"),
        ({"num_frames": 33}, {}, "num_frames is 33, more than the 32 of this server"),
    ],
)
def test_a_request_cannot_ask_for_larger_items(
    processor: MediaProcessor, io_kwargs: dict, asked: dict, hint: str
) -> None:
    with pytest.raises(ValueError, match=hint):
        processor.narrowed(processor.settings(processor.default_sampling), io_kwargs, asked, 100)


def test_a_request_may_give_the_sampling_in_either_place(processor: MediaProcessor) -> None:
    server = processor.settings(VideoSampling(num_frames=8))
    for asked in (({"num_frames": 4}, {}), ({}, {"num_frames": 4})):
        assert processor.narrowed(server, *asked, 100).sampling == VideoSampling(num_frames=4)


def test_capping_a_videos_pixels(model_dir: Path) -> None:
    video = decoded(8, 100, 100)
    tuned = MediaProcessor(model_dir, mm_processor_kwargs={"max_video_tokens": 8})
    free = tuned.process_video(video)
    server = tuned.settings(tuned.default_sampling)
    capped = tuned.process_video(video, settings=tuned.narrowed(server, {}, {"cap_pixels_per_frame": True}, 9))
    assert capped.num_tokens < free.num_tokens
    strict = MediaProcessor(model_dir, mm_processor_kwargs={"cap_pixels_per_frame": True, "max_video_tokens": 8})
    assert strict.process_video(video).grid_thw == capped.grid_thw
    with pytest.raises(ValueError, match="cannot be turned off"):
        strict.narrowed(strict.settings(strict.default_sampling), {}, {"cap_pixels_per_frame": False}, 9)


def test_times_of_a_variable_rate_reach_the_processor(
    processor: MediaProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    half = processor.hf_processor.video_processor
    original = type(half).__call__

    def watched(self, videos, **kwargs):
        seen.extend(kwargs["video_metadata"])
        return original(self, videos, **kwargs)

    monkeypatch.setattr(type(half), "__call__", watched)
    data = clips.encode(7, stamps=[0, 1, 2, 30, 31, 59, 60])
    item = processor.process_video(decode_video(data, VideoSampling(num_frames=4)))
    assert seen[0].timestamps == pytest.approx([0.0, 0.2, 3.1, 6.0], abs=0.5)  # to half a frame at the mean rate
    whole = decode_video(clips.encode(60), VideoSampling(num_frames=60))
    assert processor.process_video(whole) and seen[1].timestamps == pytest.approx(whole.timestamps)
    assert item.missing is None


def test_seconds_per_grid_of_a_part(processor: MediaProcessor) -> None:
    """A frame each half second makes a step of two frames a second long, wherever it is taken from."""
    data = clips.encode(60, rate=10)
    for window in ({}, {"start": 1.0, "end": 4.0}, {"start": 4.0}):
        item = processor.process_video(decode_video(data, VideoSampling(fps=2, **window)))
        assert item.second_per_grid == pytest.approx(1.0)


def test_a_ribbon_is_refused(processor: MediaProcessor) -> None:
    with pytest.raises(MediaError, match=r"^image 1: 201x1 .* crop it"):
        processor.process_image(np.zeros((1, 201, 3), np.uint8), item="image 1")
    with pytest.raises(MediaError, match=r"^video 1: 1x201"):
        processor.process_video(decoded(2, 201, 1), item="video 1")


def test_threads_at_once_get_the_same_results(processor: MediaProcessor) -> None:
    videos = [decoded(4, 60 + 8 * index, 90) for index in range(4)]
    alone = [processor.process_video(video) for video in videos]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(5):
            item = processor.process_video(videos[index])
            image = processor.process_image(videos[index].frames[0])
            if not torch.equal(item.patches, alone[index].patches) or image.modality != "image":
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_importing_the_module_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, mini_engine.media.processor; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_patches_stay_on_the_device_where_they_are_made(model_dir: Path) -> None:
    """On torch's meta device, which computes shapes alone and is there everywhere."""
    processor = MediaProcessor(model_dir, device="meta")
    for item in (processor.process_image(decoded(1, 60, 100).frames[0]), processor.process_video(decoded(4, 60, 100))):
        assert item.patches.device.type == "meta" and item.patches.dtype == torch.uint8


def test_an_item_without_room_on_the_device_is_made_on_the_cpu_and_counted(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again on the meta device, which here has no room for videos."""
    processor, plain = MediaProcessor(model_dir, device="meta"), MediaProcessor(model_dir)
    video, make = decoded(4, 60, 100), processor.hf_processor.video_processor.preprocess

    def without_room(*args: Any, **more: Any) -> Any:
        if more["device"] == "meta":
            raise torch.OutOfMemoryError("CUDA out of memory. 3.00 GiB allowed")
        return make(*args, **more)

    monkeypatch.setattr(processor.hf_processor.video_processor, "preprocess", without_room)
    counter = metrics.ipc_fallbacks_total.labels("processor_memory")._value
    before = counter.get()
    item = processor.process_video(video)
    assert item.patches.equal(plain.process_video(video).patches)
    assert counter.get() == before + 1
    assert processor.process_image(video.frames[0]).patches.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_patches_of_a_device_are_those_of_the_cpu_but_for_rounding(model_dir: Path) -> None:
    """Of frames whose edges, sharpened by the resize, stay within 0 to 255. What goes beyond is cut off after each of
    the CPU's two passes over bytes, and once at the device's end, and differs by more."""
    video = decoded(4, 60, 100)
    video = dataclasses.replace(video, frames=96 + video.frames // 4)
    here, there = (MediaProcessor(model_dir, device=device).process_video(video) for device in (None, "cuda:0"))
    assert here.grid_thw == there.grid_thw
    assert (here.patches.int() - there.patches.cpu().int()).abs().max() <= 1
