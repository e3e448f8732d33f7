"""Random tiny checkpoints, written by transformers, and transformers' own logits for prompts."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mini_engine.model.config import ModelConfig
from mini_engine.model.reference import Prompt
from mini_engine.model.registry import canonical_name

IMAGE, VIDEO, START, END = 190, 191, 192, 193
PATCH_DIM = 3 * 2 * 4 * 4


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Checkpoint:
    """A directory, and what transformers makes of it."""

    path: Path
    oracle: Qwen2_5_VLForConditionalGeneration

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dir(self.path)


def build_oracle(vocab_size: int, kv_heads: int, tied: bool) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(vocab_size)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": 4,
            "window_size": 16,  # two merged patches a side
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        # transformers starts biases at 0 and norms at 1, which would hide a bias added twice.
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name or "ln_q" in name else 0.0, 0.1)
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Tied embeddings, two key-value heads, as `save_pretrained` writes it."""
    oracle = build_oracle(200, kv_heads=2, tied=True)
    path = tmp_path_factory.mktemp("tied")
    oracle.save_pretrained(path)
    return Checkpoint(path, oracle)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A head of its own, one key-value head (fewer than two ranks), a vocabulary that two do not divide."""
    oracle = build_oracle(203, kv_heads=1, tied=False)
    path = tmp_path_factory.mktemp("untied")
    oracle.save_pretrained(path)
    return Checkpoint(path, oracle)


@pytest.fixture(scope="session")
def layouts(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in every layout of the hub."""
    config = json.loads((checkpoint.path / "config.json").read_text())
    tensors = load_file(checkpoint.path / "model.safetensors")
    flat = {k: v for k, v in config.items() if k not in ("text_config", "dtype")} | config["text_config"]
    flat |= {"model_type": "qwen2_5_vl", "torch_dtype": "float32", "tie_word_embeddings": True}
    rope = flat.pop("rope_parameters")
    flat |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    flat["vision_config"] = {
        k: v for k, v in config["vision_config"].items() if k not in ("in_channels", "rope_parameters")
    }
    flat["vision_config"]["in_chans"] = 3

    def write(name: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
        path = tmp_path_factory.mktemp(name)
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors")
        return path

    sharded = tmp_path_factory.mktemp("sharded")
    checkpoint.oracle.save_pretrained(sharded, max_shard_size="100KB")
    return {
        "saved": checkpoint.path,
        "old": write("old", flat, tensors),
        "new": write("new", config, {canonical_name(name): tensor for name, tensor in tensors.items()}),
        "sharded": sharded,
    }


def oracle_logits(oracle: Qwen2_5_VLForConditionalGeneration, prompt: Prompt) -> Tensor:
    """transformers' logits `[tokens, vocab_size]` of one prompt."""
    ids = torch.tensor([prompt.token_ids])
    inputs: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    if prompt.images:
        inputs["pixel_values"] = torch.cat([patches for patches, _ in prompt.images])
        inputs["image_grid_thw"] = torch.tensor([grid for _, grid in prompt.images])
    if prompt.videos:
        inputs["pixel_values_videos"] = torch.cat([patches for patches, _ in prompt.videos])
        inputs["video_grid_thw"] = torch.tensor([grid for _, grid in prompt.videos])
        inputs["second_per_grid_ts"] = torch.tensor(prompt.seconds)
    with torch.inference_mode():
        oracle.model.rope_deltas = None
        return oracle(input_ids=ids, use_cache=False, **inputs).logits[0]


@pytest.fixture(scope="session")
def oracle() -> Callable[..., Tensor]:
    return oracle_logits


@pytest.fixture(scope="session")
def prompts() -> dict[str, Prompt]:
    """Text, image, video, several items, and both modalities in either order; edges that do not fill a window."""
    generator = torch.Generator().manual_seed(1)

    def item(*grid: int) -> tuple[Tensor, Any]:
        return torch.randn(grid[0] * grid[1] * grid[2], PATCH_DIM, generator=generator), grid

    def at(token_id: int, *items: tuple[Tensor, Any]) -> list[int]:
        return [t for patches, _ in items for t in (START, *[token_id] * (len(patches) // 4), END, 17)]

    wide, small, clip, long = item(1, 6, 10), item(1, 4, 4), item(3, 14, 4), item(9, 4, 6)
    return {
        "text": Prompt(list(range(3, 40))),
        "image": Prompt([5, *at(IMAGE, wide), 7, 8], images=[wide]),
        "video": Prompt([5, *at(VIDEO, clip), 9], videos=[clip], seconds=[1.0]),
        "two videos": Prompt([*at(VIDEO, long, clip), 11], videos=[long, clip], seconds=[2.0, 1.0]),
        "video then images": Prompt(
            [*at(VIDEO, clip), *at(IMAGE, small, wide), 12, 13], images=[small, wide], videos=[clip], seconds=[1.0]
        ),
        "image then video": Prompt(
            [4, *at(IMAGE, small), *at(VIDEO, long), 6], images=[small], videos=[long], seconds=[3.0]
        ),
    }
