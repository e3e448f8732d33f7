"""Builds a small directory with the processor of a family: tokenizer, chat template, image and video settings."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.media.processor import MediaProcessor, MediaSettings

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{%- for call in message.tool_calls %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{- '<think>\\n' }}{%- endif %}{%- endif %}
"""
PROCESSORS = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}
PROCESSORS |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "Qwen3VLProcessor")
NAMES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}
NAMES |= {"qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5_moe": "Qwen3_5Moe"}


def build(directory: Path, family: str = "qwen2_5_vl") -> Path:
    """Writes the files into `directory`, which AutoProcessor then loads, and returns it.

    The largest image and the largest frame have 48 and 24 tokens; with Qwen3-VL's processor the largest video has 96.
    """
    _write_tokenizer(directory / "tokenizer.json")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    is_third = family.startswith("qwen3")
    common: dict[str, Any] = {"patch_size": 16 if is_third else 14, "temporal_patch_size": 2, "merge_size": 2}
    token = (2 * common["patch_size"]) ** 2  # pixels
    if is_third:
        common |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image = {"shortest_edge": 4 * token, "longest_edge": 48 * token}
    video = {"shortest_edge": 4 * token, "longest_edge": (2 * 96 if is_third else 24) * token}
    sampled = {} if is_third else {"num_frames": 32}
    frames = sampled | {
        "video_processor_type": f"Qwen{3 if is_third else 2}VLVideoProcessor",
        "cap_pixels_per_frame": False,
    }
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    files = {
        "config": {"model_type": family, "architectures": [f"{NAMES[family]}ForConditionalGeneration"]},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **tokens},
        "processor_config": {"processor_class": PROCESSORS[family]},
        "preprocessor_config": {**common, "image_processor_type": "Qwen2VLImageProcessor", "size": image},
        "video_preprocessor_config": {**common, **frames, "size": video},
    }
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def _write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        ["a red circle moving left", "the blue square stands still", "Grüße, 世界", "yes", "no"], trainer
    )
    special = "endoftext im_start im_end vision_start vision_end vision_pad image_pad video_pad"
    tokenizer.add_special_tokens([f"<|{name}|>" for name in special.split()])
    tokenizer.save(str(path))


def own_settings(processor: MediaProcessor) -> MediaSettings:
    """The model's own, of a server without flags."""
    return MediaSettings(VideoSampling(num_frames=32), processor.arguments)
