"""The tokenizer takes any text; the chat template has Qwen2.5-VL's form."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen2_5_VLConfig

from mini_engine.config import BUNDLED_MODEL
from training import questions

SAVED = AutoTokenizer.from_pretrained(BUNDLED_MODEL)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives(text):
    assert SAVED.decode(SAVED.encode(text)) == text


def test_special_tokens_are_where_the_config_says():
    config = Qwen2_5_VLConfig.from_pretrained(BUNDLED_MODEL)
    for name in ("image", "video"):
        assert SAVED.convert_tokens_to_ids(f"<|{name}_pad|>") == getattr(config, f"{name}_token_id")
    assert SAVED.convert_tokens_to_ids("<|vision_start|>") == config.vision_start_token_id
    text = config.text_config
    assert (SAVED.eos_token_id, SAVED.pad_token_id) == (text.eos_token_id, text.pad_token_id)


def render(messages, **extra):
    return SAVED.apply_chat_template(messages, tokenize=False, **extra)


def test_messages_of_text():
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    said += [{"role": "assistant", "content": questions.HELP}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert render(said[:2]) == expected
    assert render(said[:2], add_generation_prompt=True) == expected + "<|im_start|>assistant\n"
    assert render(said) == expected + f"<|im_start|>assistant\n{questions.HELP}<|im_end|>\n"
    assert render([{"role": "developer", "content": "x"}]) == "<|im_start|>system\nx<|im_end|>\n"
    assert render([{"role": "assistant", "content": None}]) == "<|im_start|>assistant\n<|im_end|>\n"


@pytest.mark.parametrize(
    ("kind", "pad"), [("video", "video"), ("video_url", "video"), ("image", "image"), ("image_url", "image")]
)
def test_messages_of_parts(kind, pad):
    parts = [{"type": kind}, {"type": "text", "text": "What "}, {"type": kind}, {"type": "text", "text": "now?"}]
    item = f"<|vision_start|><|{pad}_pad|><|vision_end|>"
    assert render([{"role": "user", "content": parts}]) == f"<|im_start|>user\n{item}What {item}now?<|im_end|>\n"


def test_an_unknown_part_is_an_error():
    with pytest.raises(Exception, match="unknown type audio"):
        render([{"role": "user", "content": [{"type": "audio"}]}])
