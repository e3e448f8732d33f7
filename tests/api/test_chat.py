"""Chat messages to token ids: what the chat template gets, and what it may give."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mini_engine.api.chat import ChatRenderer
from mini_engine.api.errors import ApiError
from mini_engine.api.protocol import ChatRequest
from mini_engine.media.processor import MediaProcessor
from tests import tiny_processor
from tests.api.serving import image, video


@pytest.fixture(scope="module")
def hf(processor: MediaProcessor) -> Any:
    return processor.hf_processor


def rendered(hf: Any, messages: list[dict[str, Any]], template: str | None = None, **more: Any) -> str:
    token_ids = ChatRenderer(hf, template).render(msgspec.convert({"messages": messages, **more}, ChatRequest))
    return hf.tokenizer.decode(token_ids)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_developer_role_becomes_system_where_the_template_knows_none(hf: Any) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *user("x")]
    assert "<|im_start|>system" in rendered(hf, messages)
    assert "<|im_start|>developer" in rendered(hf, messages, tiny_processor.CHAT_TEMPLATE + "{# developer #}")


def test_tools_calls_and_results_reach_the_template(hf: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "Look."}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    messages = [
        *user("x"),
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": [image()]},
    ]
    text = rendered(hf, messages, tools=tools)
    assert '{"type": "function", "function": {"name": "look", "description": "Look."}}\n<|im_end|>' in text
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>' in text
    assert "<|im_start|>tool\n<|vision_start|><|image_pad|><|vision_end|>" in text
    rest = "{% for one in messages %}{{ one.reasoning_content }}{{ one.tool_call_id }}{% endfor %}"
    assert rendered(hf, messages[:2] + [messages[2] | {"content": "a"}], rest) == "hm1"
    assert "Look." not in rendered(hf, messages, tools=tools, tool_choice="none")
    with pytest.raises(ApiError, match="the chat template has no tools"):
        rendered(hf, user("a"), "{{ messages[0].content }}", tools=tools)


def test_end_of_the_prompt(hf: Any) -> None:
    messages = [*user("x"), {"role": "assistant", "content": "It is"}]
    assert rendered(hf, messages).endswith("It is<|im_end|>\n<|im_start|>assistant\n")
    assert rendered(hf, messages, add_generation_prompt=False).endswith("It is<|im_end|>\n")
    assert rendered(hf, messages, continue_final_message=True).endswith("<|im_start|>assistant\nIt is")
    assert rendered(hf, messages, chat_template_kwargs={"enable_thinking": True}).endswith("assistant\n<think>\n")


STRICT = "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        ("{% for m in messages %}no media here{% endfor %}", user([video()]), "wrote 0 placeholders for 1 media items"),
        (STRICT, user("a") + user("b"), "the chat template rejects these messages: one message only"),
        ("{% for %}", user("a"), "chat template"),
    ],
)
def test_templates_that_fail(hf: Any, template: str, messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        rendered(hf, messages, template)
