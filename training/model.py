"""The bundled model: transformers' Qwen2.5-VL with small numbers, in the hub's layout.

The directory `weights` is where its configuration, tokenizer, chat template and preprocessing are kept; the constants
here are what the training needs of them. The generation default is sampling at a temperature of 1e-6: greedy, and a
request that asks for another temperature gets it. Nothing here knows how the model is trained.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mini_engine.config import BUNDLED_MODEL

WEIGHTS = Path(BUNDLED_MODEL)
PATCH, MERGE, TEMPORAL = 14, 2, 2  # pixels, patches, frames
NUM_FRAMES = 8
MIN_PIXELS, MAX_PIXELS = 56 * 56, 6400  # area of a resized frame: 56x56, 84x56, 112x56, 112x28, ...
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def make_model(seed: int) -> Any:
    """A fresh float32 `Qwen2_5_VLForConditionalGeneration`; matrices start from Xavier's distribution, since the
    default 0.02 is too small at this width."""
    torch.manual_seed(seed)
    config: Any = Qwen2_5_VLConfig.from_pretrained(WEIGHTS)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(parameter, std=config.text_config.hidden_size**-0.5)
        elif parameter.ndim > 1:
            torch.nn.init.xavier_uniform_(parameter.data.view(parameter.shape[0], -1))
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    return model


def publish(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Write the model's directory with other weights into `folder`, each file replaced in one step; the weights come
    last. `state` is the model's state dict, float32; tied tensors are stored once."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".publish-", dir=folder.parent) as name:
        fresh = Path(name) / "model"
        shutil.copytree(WEIGHTS, fresh, ignore=shutil.ignore_patterns("*.safetensors"))
        kept = {k: v.detach().cpu().contiguous().clone() for k, v in state.items() if k != "lm_head.weight"}
        save_file(kept, fresh / "model.safetensors", metadata={"format": "pt"})
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == "model.safetensors"):
            path.chmod(0o644)
            os.replace(path, folder / path.name)
