"""The bundled model's byte-level BPE tokenizer and chat template.

The vocabulary is learned from the demo's own questions and answers and from a list of common English words; any other
text falls back to bytes, so everything encodes and decodes. Special tokens and message form are Qwen2.5-VL's.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mini_engine.demo import questions
from mini_engine.demo.videos import COLOURS, MOTIONS, SHAPES

VOCAB_SIZE = 768  # with the special tokens; divides by 4
MAX_POSITIONS = 65536

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

COMMON_WORDS = """
the be to of and a in that have I it for not on with he as you do at this but his by from they we say her she or an will
my one all would there their what so up out if about who get which go me when make can like time no just him know take
people into year your good some could them see other than then now look only come its over think also back after use two
how our work first well way even new want because any these give day most us is are was were has had been may please
thank thanks hello hi hey yes help name word words answer question tell show let more very short brief sentence exactly
assistant helpful system user video image picture clip frame shape colour color thing object moving left right up down
still three second third each order where why while here through before between such under last long great little own
much many those both same another around small large part number never always again place world life hand high old tell
me about weather today write poem story sum count list explain are you sure what can you do who are you joke
"""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + ('system' if message['role'] == 'developer' else message['role']) + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] or [] %}
            {%- if part['type'] in ('image', 'image_url') %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part['type'] in ('video', 'video_url') %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif part['type'] == 'text' %}
                {{- part['text'] }}
            {%- else %}
                {{- raise_exception('a content part has the unknown type ' + part['type']) }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def corpus() -> list[str]:
    """The texts from which the merges are learned; the demo's own words come often enough to become one token each."""
    asked = [text for texts in questions.PHRASINGS.values() for text in texts]
    turns = [f"system\n{questions.HELP}\nuser\n{text}\nassistant\n" for text in asked]
    said = [f"{which}: a {c} {s} moving {m}; an {c} {s} standing still"
            for which in questions.ORDINALS for c in COLOURS for s in SHAPES for m in MOTIONS]  # fmt: skip
    bare = [word for word in (*COLOURS, *SHAPES, *MOTIONS, "assistant", "user", "system") for _ in range(20)]
    common = COMMON_WORDS.split()
    return turns * 20 + said + bare + [" ".join(common)] * 3 + [word.capitalize() for word in common]


def build() -> Tokenizer:
    """Learn the vocabulary. The same bytes come out on every machine."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen2_5_VLProcessor",
        "model_max_length": MAX_POSITIONS,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
