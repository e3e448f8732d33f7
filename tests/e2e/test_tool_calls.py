"""Tool calls of the bundled model, which has not learned them: a grammar makes any model call a function."""

from __future__ import annotations

import json
from typing import Any

from mini_engine.demo import videos
from tests.e2e.asking import image_url
from tests.e2e.running_server import RunningServer

COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
LOOK = {"name": "look", "parameters": COLOUR | {"additionalProperties": False}}
TOOLS: Any = [{"type": "function", "function": one} for one in ({"name": "wait"}, LOOK)]


def test_forced_calls_and_a_result_with_an_image(server: RunningServer) -> None:
    messages: list[Any] = [{"role": "user", "content": "What colour is it?"}]
    asked: Any = {"model": server.model, "tools": TOOLS, "parallel_tool_calls": False, "temperature": 0}
    chat = server.client.chat.completions
    for choice, reason in (("required", "tool_calls"), (TOOLS[1], "stop")):
        whole = chat.create(messages=messages, tool_choice=choice, **asked).choices[0]
        with chat.stream(messages=messages, tool_choice=choice, **asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        for one in (whole, streamed):
            (call,) = one.message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert (one.finish_reason, one.message.content or "") == (reason, "")
            assert arguments == {} if call.function.name == "wait" else arguments["colour"] in ("red", "blue")
        assert call.function.name == whole.message.tool_calls[0].function.name
    assert call.function.name == "look"
    part = {"type": "image_url", "image_url": {"url": image_url(videos.render_image(1))}}
    messages += [whole.message, {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": [part]}]
    reply = chat.create(messages=messages, **asked)
    assert reply.usage.prompt_tokens_details.image_tokens > 0 and reply.choices[0].finish_reason == "stop"
