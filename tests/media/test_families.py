"""The processors of the other families: patches, prompts and defaults are those of their own full call."""

import numpy as np
import pytest
import torch

from mini_engine.api.chat import ChatRenderer, Placeholder
from mini_engine.media.processor import MediaProcessor
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import decode_video
from tests.media import clips, tiny_processor
from tests.media.test_processor import decoded, full_call, normalised

FAMILIES = ("qwen2_vl", "qwen3_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def processor(request, tmp_path_factory) -> MediaProcessor:
    return MediaProcessor(tiny_processor.build(tmp_path_factory.mktemp("model"), request.param))


@pytest.fixture(scope="module")
def third(tmp_path_factory) -> MediaProcessor:
    return MediaProcessor(tiny_processor.build(tmp_path_factory.mktemp("model"), "qwen3_vl"))


@pytest.mark.parametrize(("height", "width"), [(48, 64), (90, 62), (300, 40), (224, 224)])
@pytest.mark.parametrize("frames", [2, 5, 8])
def test_video_equals_the_processors_own(processor, frames, height, width):
    video = decoded(frames, height, width, fps=29.97, total=frames * 3)
    item = processor.process_video(video)
    expected = full_call(processor, video)
    assert item.patches.dtype == torch.uint8
    assert item.grid_thw == tuple(expected["video_grid_thw"][0].tolist())
    assert item.second_per_grid is None
    assert item.num_tokens == (expected["input_ids"] == processor.hf_processor.video_token_id).sum()
    torch.testing.assert_close(normalised(processor, item), expected["pixel_values_videos"].double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(48, 64), (300, 40), (1, 3)])
def test_image_equals_the_processors_own(processor, height, width):
    image = decoded(1, height, width).frames[0]
    item = processor.process_image(image)
    expected = full_call(processor, image=image, input_data_format="channels_last")
    assert item.grid_thw == tuple(expected["image_grid_thw"][0].tolist())
    assert item.placeholder is None
    torch.testing.assert_close(normalised(processor, item), expected["pixel_values"].double(), atol=1e-6, rtol=0)


def test_prompts_equal_those_of_the_processors_full_call(processor):
    """Two videos and an image; the times of the frames that were kept are uneven."""
    renderer, hf = ChatRenderer(processor.hf_processor), processor.hf_processor
    videos = [
        decode_video(clips.encode(30, rate=10), VideoSampling(num_frames=7)),
        decode_video(clips.encode(60, rate=12), VideoSampling(num_frames=4, start=1.0)),
    ]
    picture = decoded(1, 60, 90).frames[0]
    content = [{"type": "video"}, {"type": "text", "text": " and "}, {"type": "image"}, {"type": "video"}]
    parts = [part if part["type"] == "text" else part | {"url": "x"} for part in content]
    items = [processor.process_video(videos[0]), processor.process_image(picture), processor.process_video(videos[1])]
    placeholders = [Placeholder(item.modality, item.num_tokens, item.placeholder) for item in items]
    ours = renderer.expand(renderer.render([{"role": "user", "content": parts}]), placeholders)
    theirs = hf(
        text=[
            hf.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        ],
        images=[picture],
        videos=[video.frames for video in videos],
        do_sample_frames=False,
        video_metadata=[
            {
                "total_num_frames": video.window_frames,
                "fps": video.fps,
                "frames_indices": np.rint(video.timestamps * video.fps).astype(int).tolist(),
                "duration": video.duration,
            }
            for video in videos
        ],
    )
    assert ours.token_ids == list(theirs["input_ids"][0])
    for placed, item in zip(ours.items, items, strict=True):
        token = hf.image_token_id if item.modality == "image" else hf.video_token_id
        runs = [placed.offset, *placed.more_offsets]
        assert len(runs) == (1 if item.placeholder is None else item.grid_thw[0])
        length = item.num_tokens // len(runs)
        assert all(ours.token_ids[run - 1 : run + length + 1].count(token) == length for run in runs)


def test_times_are_in_the_prompts_text(third):
    item = third.process_video(decode_video(clips.encode(30, rate=10), VideoSampling(fps=2)))
    pad = "<|vision_start|><|video_pad|><|vision_end|>"
    assert item.placeholder == "".join(f"<{time} seconds>{pad}" for time in ("0.2", "1.2", "2.2"))


def test_a_video_of_one_frame(third):
    """Shown twice, since a patch holds two; the processor itself refuses it."""
    still = decoded(1, 64, 96)
    item = third.process_video(still)
    twice = np.repeat(still.frames, 2, axis=0)
    expected = third.hf_processor.video_processor([twice], do_sample_frames=False, do_rescale=False, do_normalize=False)
    assert item.grid_thw == tuple(expected["video_grid_thw"][0])
    assert torch.equal(item.patches, expected["pixel_values_videos"])
    assert item.placeholder == "<0.0 seconds><|vision_start|><|video_pad|><|vision_end|>"


def test_the_families_own_sampling(processor):
    fps = getattr(processor.hf_processor.video_processor, "fps", None)
    if fps is None:
        assert processor.default_sampling == VideoSampling(num_frames=32)
    else:
        assert processor.default_sampling == VideoSampling(fps=2, min_frames=4, max_frames=768)


@pytest.mark.parametrize("asked", [{"max_pixels": 16 * 1024}, {"size": {"longest_edge": 16 * 1024}}])
def test_fewer_pixels_in_all_frames_of_a_video(third, asked, tmp_path):
    video = decoded(6, 160, 160)
    narrowed = third.narrowed(third.settings(VideoSampling(fps=1)), {}, asked, 10)
    tuned = MediaProcessor(tiny_processor.build(tmp_path, "qwen3_vl"), mm_processor_kwargs={"max_pixels": 16 * 1024})
    expected = full_call(third, video, size={"shortest_edge": 4 * 1024, "longest_edge": 16 * 1024})
    assert third.process_video(video).num_tokens > 8
    for item in (third.process_video(video, settings=narrowed), tuned.process_video(video)):
        assert list(item.grid_thw) == expected["video_grid_thw"][0].tolist()
