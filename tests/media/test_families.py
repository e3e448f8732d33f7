"""The processors of all families: patches, prompts and sampling equal those of the model's own full call."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from mini_engine.media.frame_sampling import VideoFacts
from mini_engine.media.processor import MediaProcessor, ProcessedItem
from mini_engine.media.sources.fetch import CLOCK
from mini_engine.prompt.renderer import ChatRenderer
from mini_engine.protocol.bodies import ChatMessage, ChatRequest
from tests.support import tiny_processor
from tests.support.decoding import Video
from tests.support.full_call import assert_same, decoded, full_call
from tests.support.tiny_processor import own_settings


@pytest.fixture(scope="module", params=tiny_processor.PROCESSORS)
def model_dir(request, tmp_path_factory) -> Path:
    return tiny_processor.build(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def processor(model_dir) -> MediaProcessor:
    return MediaProcessor(model_dir)


def process_video(processor: MediaProcessor, video: Video) -> ProcessedItem:
    return processor.process_video(*video, own_settings(processor))


def test_patches_equal_those_of_a_full_call(processor):
    for height, width in ((90, 62), (300, 40), (1, 3)):
        for count in (2, 5, 8):
            video = decoded(count, height, width, np.arange(3 * count) / 29.97)
            item, expected = process_video(processor, video), full_call(processor, video)
            assert_same(processor, item, expected)
            duration = 2 * 3 * count / 29.97 / count
            assert item.facts.second_per_grid == pytest.approx(expected.get("second_per_grid_ts", [duration])[0])
        image = video.frames[0]
        item = processor.process_image(image, own_settings(processor))
        assert_same(processor, item, full_call(processor, image))
        assert (item.facts.second_per_grid, item.facts.placeholder, item.missing) == (None, None, None)


def test_a_processor_of_another_family_is_refused(processor):
    sizes = processor.patch_size, processor.step
    processor.check_sizes(*sizes, 2)
    with pytest.raises(ValueError, match="the processor has patch_size"):
        processor.check_sizes(*sizes, 1)


def test_prompts_equal_those_of_a_full_call(processor):
    """Two videos, of uneven times and of a window, and an image."""
    renderer, hf = ChatRenderer(processor.hf_processor), processor.hf_processor
    media = [
        decoded(4, 48, 64, np.array([0, 1, 2, 30, 31, 59, 60]) / 10),
        decoded(1, 60, 90).frames[0],
        decoded(4, 48, 64, fps=2, start=1.0, end=4.0),
    ]
    content = [{"type": "video"}, {"type": "text", "text": " and "}, {"type": "image"}, {"type": "video"}]
    video, image = ({"type": f"{kind}_url", f"{kind}_url": "x"} for kind in ("video", "image"))
    parts = [video, content[1], image, video]
    image_item = processor.process_image(media[1], own_settings(processor))
    items = [process_video(processor, media[0]), image_item, process_video(processor, media[2])]
    message = msgspec.convert({"role": "user", "content": parts}, ChatMessage)
    prompt = renderer.render(ChatRequest(messages=[message])).token_ids
    token_ids, placed_items = renderer.expand(prompt, items)
    text = hf.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    theirs = full_call(processor, *media, text=text)
    assert token_ids == list(theirs["input_ids"][0])
    for item in placed_items:
        token = hf.image_token_id if item.modality == "image" else hf.video_token_id
        runs = item.offsets
        assert len(runs) == (1 if item.placeholder is None else item.grid_thw[0])
        length = item.num_tokens // len(runs)
        assert all(token_ids[run - 1 : run + length + 1].count(token) == length for run in runs)
    # The window keeps a frame each half second, and a step has two.
    if "second_per_grid_ts" in theirs:
        assert item.second_per_grid == pytest.approx(1.0) == theirs["second_per_grid_ts"][1].item()
    if item.placeholder is not None:
        assert re.findall(r"<([\d.]+) seconds>", item.placeholder) == ["1.3", "2.5", "3.6"]


def test_a_video_of_one_frame_fills_a_patch_twice(processor):
    """Qwen3-VL's own processor refuses a single one."""
    still = decoded(1, 64, 96)
    twice = np.repeat(still.frames, 2, axis=0)
    own = processor.hf_processor.video_processor([twice], do_sample_frames=False, do_rescale=False, do_normalize=False)
    item = process_video(processor, still)
    assert item.facts.grid_thw == tuple(own["video_grid_thw"][0])
    assert torch.equal(item.patches, own["pixel_values_videos"])
    assert item.facts.placeholder in (None, "<0.0 seconds><|vision_start|><|video_pad|><|vision_end|>")


def test_frames_that_the_client_sends_keep_their_times(processor):
    facts = VideoFacts([10.0, 10.4, 12.0, 14.0], fps=CLOCK, total_frames=5000, window_frames=5000)
    item = process_video(processor, decoded(4, 64, 96)._replace(facts=facts)).facts
    assert item.second_per_grid == pytest.approx(2.5)
    assert re.findall(r"<([\d.]+) seconds>", item.placeholder or "<10.2 seconds><13.0 seconds>") == ["10.2", "13.0"]


def test_concurrent_threads_get_equal_patches(processor: MediaProcessor) -> None:
    videos = [decoded(4, 60 + 8 * index, 90) for index in range(4)]
    alone = [process_video(processor, video).patches for video in videos]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda video: process_video(processor, video), videos * 5))
    assert all(torch.equal(item.patches, patches) for item, patches in zip(made, alone * 5, strict=True))


@pytest.mark.gpu
def test_patches_of_cuda_equal_those_of_the_cpu_but_for_rounding(model_dir: Path) -> None:
    """The resize sharpens edges, which here stay within 0 to 255: CPU and CUDA clamp what is beyond at other steps."""
    video = decoded(4, 60, 100)
    video = video._replace(frames=96 + video.frames // 4)
    here, there = (process_video(MediaProcessor(model_dir, device=device), video) for device in (None, "cuda:0"))
    assert here.facts.grid_thw == there.facts.grid_thw
    assert (here.patches.int() - there.patches.cpu().int()).abs().max() <= 1
