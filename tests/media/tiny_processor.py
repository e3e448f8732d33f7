"""Builds a small directory with a Qwen2.5-VL processor: tokenizer, chat template, image and video settings."""

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


def build(directory: Path) -> Path:
    """Writes the files into `directory`, which AutoProcessor then loads, and returns it."""
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
    common = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    files = {
        "config.json": {"model_type": "qwen2_5_vl"},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
        "processor_config.json": {"processor_class": "Qwen2_5_VLProcessor"},
        "preprocessor_config.json": common
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 48 * 28 * 28},
        },
        "video_preprocessor_config.json": common
        | {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 24 * 28 * 28},
            "cap_pixels_per_frame": False,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory
