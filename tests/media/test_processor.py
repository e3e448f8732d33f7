import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

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
    mean = torch.tensor(processor.image_mean).double().view(1, 3, 1)
    std = torch.tensor(processor.image_std).double().view(1, 3, 1)
    return ((patches * processor.rescale_factor - mean) / std).view(len(item.patches), -1)


def full_call(processor: MediaProcessor, video: DecodedVideo | None = None, image: np.ndarray | None = None, **kwargs):
    """The model's own processor, called as its documentation says."""
    text = processor.image_token if image is not None else processor.video_token
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
    assert item.num_tokens == (expected["input_ids"] == processor.video_token_id).sum()
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
    assert item.num_tokens == (expected["input_ids"] == processor.image_token_id).sum()
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
        ({"size": "large"}, "fails with --mm-processor-kwargs"),
        ({"size": {"shortest_edge": 784, "longest_edge": 7840}, "min_pixels": 784}, "either size or min_pixels"),
        ({"fps": 2, "num_frames": 4}, "exactly one of num_frames and fps"),
    ],
)
def test_bad_kwargs_fail_at_start(model_dir: Path, kwargs: dict, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        MediaProcessor(model_dir, mm_processor_kwargs=kwargs)


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


def test_what_the_worker_and_the_prompt_need(processor: MediaProcessor) -> None:
    hf = processor.hf_processor
    assert processor.image_mean == tuple(hf.image_processor.image_mean)
    assert processor.image_std == tuple(hf.video_processor.image_std)
    assert processor.rescale_factor == pytest.approx(1 / 255)
    assert (processor.patch_size, processor.temporal_patch_size, processor.merge_size) == (14, 2, 2)
    assert hf.tokenizer.convert_tokens_to_ids(processor.image_token) == processor.image_token_id
    assert hf.tokenizer.convert_tokens_to_ids(processor.video_token) == processor.video_token_id


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
