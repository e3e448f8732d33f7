"""The bundled model's architecture and its directory: configs, preprocessor files, weights.

The model is transformers' Qwen2.5-VL with small numbers. Nothing here knows how it is trained.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mini_engine.demo import tokenizer

WEIGHTS = Path(__file__).parent / "weights"
PATCH, MERGE, TEMPORAL = 14, 2, 2  # pixels, patches, frames
NUM_FRAMES = 8
MIN_PIXELS, MAX_PIXELS = 56 * 56, 6400  # area of a resized frame: 56x56, 84x56, 112x56 and their transposes
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

PREPROCESSOR = {
    "do_resize": True,
    "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": list(MEAN),
    "image_std": list(STD),
    "do_convert_rgb": True,
    "patch_size": PATCH,
    "temporal_patch_size": TEMPORAL,
    "merge_size": MERGE,
    "processor_class": "Qwen2_5_VLProcessor",
}
IMAGE_PREPROCESSOR = {**PREPROCESSOR, "image_processor_type": "Qwen2VLImageProcessor"}
VIDEO_PREPROCESSOR = {
    **PREPROCESSOR,
    "video_processor_type": "Qwen2VLVideoProcessor",
    "num_frames": NUM_FRAMES,
    "do_sample_frames": False,
    "cap_pixels_per_frame": False,
}


def make_config(hidden: int = 128, text_layers: int = 4, vision_layers: int = 4) -> Qwen2_5_VLConfig:
    """The model's configuration. Heads, KV heads, intermediate sizes and vocabulary divide by 4 (KV heads by 2)."""
    first = tokenizer.VOCAB_SIZE - len(tokenizer.SPECIAL_TOKENS)
    ids = {token: first + offset for offset, token in enumerate(tokenizer.SPECIAL_TOKENS)}
    text = {
        "vocab_size": tokenizer.VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": text_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": tokenizer.MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [hidden // 32, 3 * hidden // 64, 3 * hidden // 64],
        },
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": vision_layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": 4,
        "out_hidden_size": hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "window_size": 2 * MERGE * PATCH,
        "fullatt_block_indexes": list(range(1, vision_layers, 2)),
        "tokens_per_second": 4,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="float32",
    )


def make_model(config: Any, seed: int = 0) -> Any:
    """A fresh float32 `Qwen2_5_VLForConditionalGeneration`; matrices start from Xavier's distribution, since the
    default 0.02 is too small at this width."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(parameter, std=config.text_config.hidden_size**-0.5)
        elif parameter.ndim > 1:
            torch.nn.init.xavier_uniform_(parameter.data.view(parameter.shape[0], -1))
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    return model


def save_support_files(folder: Path, config: Any) -> None:
    """Write everything but the weights: config, generation defaults, tokenizer, template, preprocessor files."""
    tokenizer.save(folder)
    described = config.to_diff_dict()
    # the vision rope has one form, and older releases know no name for it
    del described["vision_config"]["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    end, pad = config.text_config.eos_token_id, config.text_config.pad_token_id
    # So low a temperature makes greedy decoding the default, and a request that asks for another gets it.
    generation = {"do_sample": True, "temperature": 1e-6, "eos_token_id": [end, pad], "pad_token_id": pad}
    for name, content in (
        ("generation_config.json", generation),
        ("preprocessor_config.json", IMAGE_PREPROCESSOR),
        ("video_preprocessor_config.json", VIDEO_PREPROCESSOR),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def publish(folder: Path, config: Any, state: dict[str, torch.Tensor]) -> None:
    """Write the hub directory layout into `folder`, each file replaced in one step; the weights come last.

    `state` is the model's state dict, float32; tied tensors are stored once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".publish-", dir=folder.parent) as name:
        fresh = Path(name)
        save_support_files(fresh, config)
        kept = {k: v.detach().cpu().contiguous().clone() for k, v in state.items() if k != "lm_head.weight"}
        save_file(kept, str(fresh / "model.safetensors"), metadata={"format": "pt"})
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == "model.safetensors"):
            path.chmod(0o644)
            os.replace(path, folder / path.name)
