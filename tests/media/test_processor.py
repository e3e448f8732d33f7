from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine import metrics
from mini_engine.media.processor import MediaProcessor, ProcessedItem
from tests.media.decoding import Video
from tests.media.test_families import decoded
from tests.tiny_processor import own_settings


def process(processor: MediaProcessor, video: Video) -> ProcessedItem:
    return processor.process_video(*video, own_settings(processor))


def test_concurrent_threads_get_equal_patches(processor: MediaProcessor) -> None:
    videos = [decoded(4, 60 + 8 * index, 90) for index in range(4)]
    alone = [process(processor, video).patches for video in videos]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda video: process(processor, video), videos * 5))
    assert all(torch.equal(item.patches, patches) for item, patches in zip(made, alone * 5, strict=True))


def test_full_device_falls_back_to_the_cpu_and_is_counted(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's meta device, which computes shapes alone. Here it has no memory for videos."""
    processor, plain = MediaProcessor(model_dir, device="meta"), MediaProcessor(model_dir)
    video, preprocess = decoded(4, 60, 100), processor.hf_processor.video_processor.preprocess
    assert process(processor, video).patches.device.type == "meta"

    def out_of_memory(*args: Any, **more: Any) -> Any:
        if more["device"] == "meta":
            raise torch.OutOfMemoryError("CUDA out of memory. 3.00 GiB allowed")
        return preprocess(*args, **more)

    monkeypatch.setattr(processor.hf_processor.video_processor, "preprocess", out_of_memory)
    counter = metrics.ipc_fallbacks_total.labels("processor_memory")._value
    before = counter.get()
    assert process(processor, video).patches.equal(process(plain, video).patches)
    assert counter.get() == before + 1
    assert processor.process_image(video.frames[0], own_settings(processor)).patches.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_patches_of_cuda_equal_those_of_the_cpu_but_for_rounding(model_dir: Path) -> None:
    """The resize sharpens edges, which here stay within 0 to 255: CPU and CUDA clamp what is beyond at other steps."""
    video = decoded(4, 60, 100)
    video = video._replace(frames=96 + video.frames // 4)
    here, there = (process(MediaProcessor(model_dir, device=device), video) for device in (None, "cuda:0"))
    assert here.grid_thw == there.grid_thw
    assert (here.patches.int() - there.patches.cpu().int()).abs().max() <= 1
