"""A model directory of any size, made without transformers: a config in code, and its dummy weights as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mini_engine.model.layers import pieces_of
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.weights import load_model

CPU = torch.device("cpu")


def write_config(folder: Path, hidden: int = 64, layers: int = 2, dtype: str = "float32", **text: Any) -> Path:
    """`config.json` of a Qwen2.5-VL with heads of 16."""
    heads = hidden // 16
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "dtype": dtype,
        "image_token_id": 190, "video_token_id": 191,
        "text_config": {
            "vocab_size": 200, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6, "rope_parameters": {"mrope_section": [2, 3, 3], "rope_theta": 1e4}, **text,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": hidden,
            "patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The checkpoint's tensors by name, of a model on one rank."""
    tensors: dict[str, Tensor] = {}
    for piece in pieces_of(model):
        tensors.setdefault(piece.source, torch.empty(piece.shape, dtype=piece.target.dtype))[piece.index] = piece.target
    return tensors


def write_weights(folder: Path, with_head: bool = False) -> dict[str, Tensor]:
    """The dummy weights of a directory's config, as its `model.safetensors`; `with_head`: that has a tied head too."""
    tensors = whole_tensors(load_model(folder, TensorParallel(), None, CPU, "dummy"))
    table = tensors["model.language_model.embed_tokens.weight"]
    save_file(tensors | ({"lm_head.weight": table.clone()} if with_head else {}), folder / "model.safetensors")
    return tensors
