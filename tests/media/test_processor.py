import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine import metrics
from mini_engine.media.processor import MediaProcessor
from mini_engine.media.sampling import VideoSampling
from tests.media import tiny_processor
from tests.media.test_families import decoded, full_call

EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_pixels": 5000},
        {"size": {"shortest_edge": 1000, "longest_edge": 6000}},
        {"min_pixels": 1000},
        {"max_pixels": 1000},  # less than the model's minimum, which is lowered
        {"min_pixels": 10000},  # more than that, which only a server may ask for
    ],
    ids=str,
)
def test_pixel_bounds_of_server_and_request(family: str, kwargs: dict, tmp_path: Path) -> None:
    """The model's own processor makes the same grids, called with the resulting sizes."""
    own = MediaProcessor(tiny_processor.build(tmp_path, family))
    made = [(MediaProcessor(tmp_path, mm_processor_kwargs=kwargs), None)]
    if kwargs != {"min_pixels": 10000}:
        made += [(own, own.narrowed(own.settings(own.default_sampling), {}, kwargs, 10))]
    asked = kwargs.get("size") or {EDGES[name]: value for name, value in kwargs.items()}
    for video in (decoded(4, 48, 64), decoded(4, 300, 40), decoded(4, 224, 224)):
        for kind, item in (("image", video.frames[0]), ("video", video)):
            sizes = dict(getattr(own.hf_processor, f"{kind}_processor").size) | asked
            sizes = {edge: sizes[edge] for edge in EDGES.values()}
            expected = full_call(own, item, size=sizes | {"shortest_edge": min(sizes.values())})[f"{kind}_grid_thw"]
            for processor, settings in made:
                assert getattr(processor, f"process_{kind}")(item, settings=settings).grid_thw == (*expected[0],)


def test_pixels_of_long_videos_can_be_capped(model_dir: Path) -> None:
    video = decoded(8, 100, 100)
    tuned = MediaProcessor(model_dir, mm_processor_kwargs={"max_video_tokens": 8})
    settings = tuned.narrowed(tuned.settings(tuned.default_sampling), {}, {"cap_pixels_per_frame": True}, 9)
    capped = tuned.process_video(video, settings=settings)
    assert capped.num_tokens < tuned.process_video(video).num_tokens
    strict = MediaProcessor(model_dir, mm_processor_kwargs={"cap_pixels_per_frame": True, "max_video_tokens": 8})
    assert strict.process_video(video).grid_thw == capped.grid_thw
    with pytest.raises(ValueError, match="cap_pixels_per_frame is on"):
        strict.narrowed(strict.settings(strict.default_sampling), {}, {"cap_pixels_per_frame": False}, 9)


BAD: list[tuple[dict, str]] = [
    ({"do_normalize": True}, "has no do_normalize; it takes size, min_pixels"),
    ({"size": {"height": 1}}, "size has no height; it takes shortest_edge, longest_edge"),
    ({"size": {}, "max_pixels": 784}, "either size"),
    ({"size": {"longest_edge": -1}}, r"size\.longest_edge must be a whole number of at least 1 and .*, not -1"),
    ({"max_pixels": True}, "max_pixels must be a whole number"),
    ({"max_pixels": 784, "min_pixels": 1568}, "number of pixels, 1568, is more than the greatest, 784"),
    ({"cap_pixels_per_frame": 1}, "cap_pixels_per_frame must be true or false"),
    ({"num_frames": 4, "fps": 1}, "exactly one of num_frames and fps"),
]


@pytest.mark.parametrize(("kwargs", "says"), [*BAD, ({"resample": 99}, "fails"), ({"max_video_tokens": 0}, "not 0")])
def test_bad_server_settings_fail_at_start(model_dir: Path, kwargs: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MediaProcessor(model_dir, mm_processor_kwargs=kwargs)


@pytest.mark.parametrize(
    ("io_kwargs", "kwargs", "says"),
    [
        *[({}, kwargs, says) for kwargs, says in BAD],
        ({}, {"max_pixels": 37633}, "max_pixels is 37633, more than the 37632 of this server's images"),
        ({}, {"max_pixels": 19600}, "max_pixels is 19600, more than the 18816 of this server's videos"),
        ({}, {"resample": 2}, "has no resample"),
        ({"num_frames": 4}, {"fps": 1}, "both say how videos are sampled"),
    ],
)
def test_requests_cannot_raise_limits(processor: MediaProcessor, io_kwargs: dict, kwargs: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        processor.narrowed(processor.settings(processor.default_sampling), io_kwargs, kwargs, 100)


def test_sampling_in_either_setting(model_dir: Path, processor: MediaProcessor) -> None:
    assert processor.sampling(None) == processor.default_sampling
    assert processor.sampling({"fps": 1}) == VideoSampling(fps=1)
    given = MediaProcessor(model_dir, mm_processor_kwargs={"fps": 2})
    assert given.sampling(None) == VideoSampling(fps=2)
    with pytest.raises(ValueError, match="both say how videos are sampled"):
        given.sampling({"num_frames": 8})
    server = processor.settings(VideoSampling(num_frames=8))
    for kwargs in (({"num_frames": 4}, {}), ({}, {"num_frames": 4})):
        assert processor.narrowed(server, *kwargs, 100).sampling == VideoSampling(num_frames=4)


def test_concurrent_threads_get_equal_patches(processor: MediaProcessor) -> None:
    videos = [decoded(4, 60 + 8 * index, 90) for index in range(4)]
    alone = [processor.process_video(video).patches for video in videos]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(processor.process_video, videos * 5))
    assert all(torch.equal(item.patches, patches) for item, patches in zip(made, alone * 5, strict=True))


def test_importing_the_module_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, mini_engine.media.processor; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_full_device_falls_back_to_the_cpu_and_is_counted(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's meta device, which computes shapes alone. Here it has no memory for videos."""
    processor, plain = MediaProcessor(model_dir, device="meta"), MediaProcessor(model_dir)
    video, preprocess = decoded(4, 60, 100), processor.hf_processor.video_processor.preprocess
    assert processor.process_video(video).patches.device.type == "meta"

    def out_of_memory(*args: Any, **more: Any) -> Any:
        if more["device"] == "meta":
            raise torch.OutOfMemoryError("CUDA out of memory. 3.00 GiB allowed")
        return preprocess(*args, **more)

    monkeypatch.setattr(processor.hf_processor.video_processor, "preprocess", out_of_memory)
    counter = metrics.ipc_fallbacks_total.labels("processor_memory")._value
    before = counter.get()
    assert processor.process_video(video).patches.equal(plain.process_video(video).patches)
    assert counter.get() == before + 1
    assert processor.process_image(video.frames[0]).patches.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_patches_of_cuda_equal_those_of_the_cpu_but_for_rounding(model_dir: Path) -> None:
    """The resize sharpens edges, which here stay within 0 to 255: CPU and CUDA clamp what is beyond at other steps."""
    video = decoded(4, 60, 100)
    video = dataclasses.replace(video, frames=96 + video.frames // 4)
    here, there = (MediaProcessor(model_dir, device=device).process_video(video) for device in (None, "cuda:0"))
    assert here.grid_thw == there.grid_thw
    assert (here.patches.int() - there.patches.cpu().int()).abs().max() <= 1
