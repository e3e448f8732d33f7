"""Builds a small directory with the processor of a family: tokenizer, chat template, image and video settings."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


PROCESSORS = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}


def build(directory: Path, family: str = "qwen2_5_vl", patch_size: int | None = None) -> Path:
    """Writes the files into `directory`, which AutoProcessor then loads, and returns it.

    The largest image and the largest frame have 48 and 24 tokens; with Qwen3-VL it is the largest video that has 96.
    """
    write_tokenizer(directory)
    processor, video_processor = PROCESSORS[family]
    is_third = family == "qwen3_vl"
    patch = patch_size or (16 if is_third else 14)
    common: dict[str, object] = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    if is_third:
        common |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    token = (2 * patch) ** 2  # pixels
    files = {
        "config.json": {"model_type": family},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
        "processor_config.json": {"processor_class": processor},
        "preprocessor_config.json": common
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 4 * token, "longest_edge": 48 * token},
        },
        "video_preprocessor_config.json": common
        | {
            "video_processor_type": video_processor,
            "size": {"shortest_edge": 4 * token, "longest_edge": (2 * 96 if is_third else 24) * token},
            "cap_pixels_per_frame": False,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


def write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["a red circle moving left", "the blue square stands still", "Grüße, 世界"], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
