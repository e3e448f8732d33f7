"""What is left for the KV cache on a CUDA device, and which step is taken for the worst."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from mini_engine.config import BUNDLED_MODEL, EngineConfig
from mini_engine.messages import MediaCachePlan
from mini_engine.model.config import ModelConfig
from mini_engine.worker import filters
from mini_engine.worker.device_memory import HUNGRY_SAMPLING, MemoryUse, media_bytes, worst_grids, worst_step

NO_MEDIA = {"image": 0, "video": 0}
OFF = MediaCachePlan("off", 0, "")
VISION = dataclasses.replace(
    ModelConfig.from_dir(BUNDLED_MODEL).vision, patch_size=14, spatial_merge_size=2
)  # 784 pixels are a token


def test_what_is_left_of_a_device():
    use = MemoryUse(total=1000, workers=1, outside=50, weights=300, step=100, media=20)
    assert use.left(0.9) == 900 - 50 - 300 - 100 - 20
    assert use.left(0.3) == -170
    assert dataclasses.replace(use, workers=2).left(1.0) == 500 - 470
    assert dataclasses.replace(use, graphs=7).left(0.9) == use.left(0.9) - 7
    assert "CUDA graphs 0.00 GiB" in str(use)


def test_the_worst_sampling_sorts_the_vocabulary(monkeypatch):
    """On a device top_p with a small top_k looks at the likeliest alone."""
    sorted_widths: list[int] = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda x, **more: sorted_widths.append(x.shape[1]) or sort(x, **more))
    params = HUNGRY_SAMPLING
    filters.keep_top_p_unseen(torch.full((2, 5000), 1 / 5000), [params.top_p] * 2, [params.top_k] * 2)
    assert sorted_widths == [5000]


def grids(tmp_path: Path, processors: dict[str, dict], **settings: object) -> list:
    for name, values in processors.items():
        (tmp_path / name).write_text(json.dumps(values))
    return worst_grids(EngineConfig(**settings), VISION, tmp_path)


def test_the_largest_frame_is_what_the_processor_lets_through(tmp_path):
    hub = {"preprocessor_config.json": {"min_pixels": 3136, "max_pixels": 784 * 100}}
    assert grids(tmp_path, hub, max_num_encoder_input_tokens=1000) == [(1, 20, 20)] * 10
    image = {"preprocessor_config.json": {"size": {"shortest_edge": 3136, "longest_edge": 784 * 9}}}
    assert grids(tmp_path, image, max_num_encoder_input_tokens=90) == [(1, 6, 6)] * 10
    video = {"video_preprocessor_config.json": {"size": {"longest_edge": 784 * 25}}}
    assert grids(tmp_path, video, max_num_encoder_input_tokens=90) == [(1, 10, 10)] * 3
    only_images = {"max_num_encoder_input_tokens": 90, "limit_mm_per_prompt": {"video": 0}}
    assert grids(tmp_path, {}, **only_images) == [(1, 6, 6)] * 10
    tuned = {"mm_processor_kwargs": {"size": {"longest_edge": 784 * 4}}, "max_num_encoder_input_tokens": 90}
    assert grids(tmp_path, {}, **tuned) == [(1, 4, 4)] * 22


def test_the_processors_of_a_joint_file(tmp_path):
    joint = {"image_processor": {"max_pixels": 784 * 4}, "video_processor": {"max_pixels": 784 * 9}}
    assert grids(tmp_path, {"processor_config.json": joint}, max_num_encoder_input_tokens=9) == [(1, 6, 6)]


def test_what_is_accepted_bounds_it(tmp_path):
    hub = {"preprocessor_config.json": {"min_pixels": 784 * 4, "max_pixels": 784 * 100}}
    small = {"max_num_encoder_input_tokens": 90, "max_image_pixels": 784 * 9, "max_frame_pixels": 784 * 9}
    assert grids(tmp_path, hub, **small) == [(1, 6, 6)] * 10
    assert grids(tmp_path, hub, **small | {"max_image_pixels": 1, "max_frame_pixels": 1}) == [(1, 4, 4)] * 22
    # One temporal grid is encoded whole, whatever a step may have; no prompt has more than the encoder cache.
    assert grids(tmp_path, hub, max_num_encoder_input_tokens=10) == [(1, 20, 20)]
    assert grids(tmp_path, hub, max_num_encoder_input_tokens=10, encoder_cache_tokens=16) == [(1, 8, 8)]
    assert grids(tmp_path, hub, limit_mm_per_prompt=NO_MEDIA) == []


def test_what_media_take():
    model = ModelConfig.from_dir(BUNDLED_MODEL)
    config = EngineConfig(encoder_cache_tokens=100, mm_ipc_memory_bytes=7, api_server_count=3)
    assert media_bytes(config, model, torch.bfloat16, OFF) == 100 * 128 * 2 + 21
    assert media_bytes(config, model, torch.float32, MediaCachePlan("shm", 5, "")) == 100 * 128 * 4 + 21
    assert media_bytes(config, model, torch.float32, MediaCachePlan("lru", 5, "")) == 100 * 128 * 4 + 21 + 5
    # A quarter of it are slots, shared out among the engines; a rank copies what comes in those of its own.
    made_there = dataclasses.replace(
        config, mm_processor_device="cuda", mm_ipc_gpu_memory_gb=24.0, data_parallel_size=2
    )
    assert media_bytes(made_there, model, torch.bfloat16, OFF) == 100 * 128 * 2 + 21 + (3 << 30)
    none = dataclasses.replace(config, limit_mm_per_prompt=NO_MEDIA)
    assert media_bytes(none, model, torch.float32, MediaCachePlan("lru", 5, "")) == 0


@pytest.mark.parametrize(
    ("tokens", "seqs", "longest", "counts"),
    [
        (None, 3, 10_000, [2046, 1, 1]),
        (100, 3, 1000, [98, 1, 1]),
        (100, 3, 60, [60, 39, 1]),
        (100, 3, 20, [20, 20, 20]),
        (2, 64, 1000, [1, 1]),
        (1, 1, 1000, [1]),
    ],
)
def test_the_worst_step(tokens, seqs, longest, counts):
    config = EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs)
    step = worst_step(config, longest)
    assert [chunk.num_tokens for chunk in step.chunks] == counts
    assert step.chunks[0].start + counts[0] == longest
    for chunk, new in zip(step.chunks, step.started, strict=True):
        assert chunk.start + chunk.num_tokens == len(new.prompt_token_ids) <= 16 * len(chunk.block_ids)
        assert set(chunk.block_ids) == {0}
