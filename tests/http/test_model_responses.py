"""`POST /v1/responses` as the openai SDK uses it; every object and event is checked strictly against its models."""

import json
import tracemalloc
from typing import Any, get_args

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from mini_engine.messages import Problem
from mini_engine.protocol.bodies import MAX_GRAMMAR, ChatMessage
from mini_engine.protocol.response_bodies import ResponsesRequest
from tests.http.test_sdk import check
from tests.support.serving import Served, image

LOOK = {"type": "function", "name": "look", "parameters": {"properties": {"at": {"type": "string"}}}, "strict": None}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
CALL_ITEM = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
KINDS = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])}


async def whole_and_events(served: Served, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole response, and the events of the streamed one, which ends as the whole does but for ids and time."""
    body = {"model": "tiny", "input": "hello", **fields}
    whole = await served.http.post("/v1/responses", json=body)
    assert whole.status_code == 200, whole.text
    check(Response, with_cache_writes(whole.json()), {"media"})
    streamed = await served.http.post("/v1/responses", json=body | {"stream": True})
    *blocks, end = streamed.text.split("\n\n")
    pairs = [block.split("\n") for block in blocks]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert end == "" and [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        check(KINDS[event["type"]], with_cache_writes(event), {"bytes", "media", "name"})
    assert events[-1]["response"]["id"] == streamed.headers["x-request-id"]
    body = with_cache_writes(whole.json())
    assert without_ids(events[-1]["response"]) == without_ids(body)
    return body, events


def with_cache_writes(value: Any) -> Any:
    """With a field that newer SDKs ask for: tokens of prompts that a client has cached by a request of its own."""
    if usage := value.get("response", value).get("usage"):
        usage["input_tokens_details"]["cache_write_tokens"] = 0
    return value


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    names = {"id", "call_id", "created_at"}
    return {k: without_ids(v) for k, v in value.items() if k not in names} if isinstance(value, dict) else value


async def test_a_thought_a_text_and_calls(served: Served) -> None:
    """Each is an item, which begins, grows and ends in the stream."""
    served.says(*f"hm\n</think>\nWell.\n{CALL}\n{CALL}END")
    more = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "reasoning": {"effort": "low"},
        "stop": "END",
    }
    body, events = await whole_and_events(
        served, tools=[LOOK], chat_template_kwargs={"enable_thinking": True}, instructions="Be brief.", **more
    )
    thought, message, *calls = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Well." and message["content"][0]["logprobs"]
    assert [(call["name"], call["arguments"]) for call in calls] == [("look", '{"at": "a"}')] * 2
    usage = body["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == len("hm\n</think")
    assert (body["status"], body["instructions"], body["tools"]) == (
        "completed",
        "Be brief.",
        [LOOK | {"description": None}],
    )
    kinds = [event["type"].removeprefix("response.") for event in events if not event["type"].endswith("delta")]
    part, call = ["content_part.done", "output_item.done"], ["output_item.added", "function_call_arguments.done"]
    begin = ["output_item.added", "content_part.added"]
    items = [*begin, "reasoning_text.done", *part, *begin, "output_text.done", *part, *[*call, "output_item.done"] * 2]
    assert kinds == ["created", "in_progress", *items, "completed"]
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[-1]["item"] == item and {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        text = "".join(event["delta"] for event in own if event["type"].endswith("delta"))
        assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


async def test_an_answer_that_is_cut_off_is_incomplete(served: Served) -> None:
    body, events = await whole_and_events(served, max_output_tokens=1, temperature=0.5, top_p=0.25)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events[-1]["type"] == "response.incomplete" and body["output"][-1]["status"] == "incomplete"
    sampling = served.core.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (1, 0.5, 0.25)


async def test_the_conversation_is_that_of_chat_completions(served: Served) -> None:
    """Messages, an image, a call and its result, a thought, and the SDK's own output sent back, are the same tokens."""
    served.says(*f"Well.\n{CALL}")
    picture = image()["image_url"]["url"]
    content = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": picture, "detail": "auto"}]
    user: Any = {"role": "user", "content": content}
    more: Any = {"model": "tiny", "tools": [LOOK], "tool_choice": "required"}
    first = await served.openai.responses.create(input=[user], instructions="Be brief.", **more)
    call: Any = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "b"}]}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    items: Any = [{"role": "developer", "content": "Be brief."}, user, thought, *first.output, result]
    await served.openai.responses.create(input=items, **more)
    function = {"id": call.call_id, "function": {"name": "look", "arguments": '{"at": "a"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What?"}, image()]},
        {"role": "assistant", "content": "Well.", "reasoning_content": "hm", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "b"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": LOOK["parameters"]}}]
    reply = await served.post(messages=messages, tools=tools, tool_choice="required")
    assert reply.status_code == 200, reply.text
    _, ours, theirs = served.core.requests
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.grammar == theirs.grammar and "look" in ours.grammar


def test_items_of_a_conversation_make_messages() -> None:
    """System messages before all others are one. A thought stays with what came after it, also if that was cut off, and
    alone it is a message of its turn."""

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    said, system = {"role": "assistant", "content": "Well."}, [{"role": "developer", "content": name} for name in "AB"]
    go_on = {"role": "user", "content": "Go on."}
    result = {"type": "function_call_output", "call_id": "1", "output": "b"}
    items = [*system, go_on, thought("1"), said, thought("2"), CALL_ITEM, result, thought("3"), go_on, said, go_on]
    items += [thought("4"), thought("5"), said, CALL_ITEM]
    body = msgspec.convert({"instructions": "Be brief.", "input": items, "n": 1.0}, ResponsesRequest)
    body.check()
    calls = {"tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]}
    expected: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief.\n\nA\n\nB"}, go_on,
        said | {"reasoning_content": "1"}, {"role": "assistant", "reasoning_content": "2", **calls},
        {"role": "tool", "tool_call_id": "1", "content": "b"}, {"role": "assistant", "reasoning_content": "3"}, go_on,
        said, go_on, said | {"reasoning_content": "45", **calls},
    ]  # fmt: skip
    ours, theirs = body.chat_request.messages, msgspec.convert(expected, list[ChatMessage])
    assert "".join(part.text or "" for part in ours[0].parts) == theirs[0].content and ours[1:] == theirs[1:]


async def test_logprobs_of_the_text_are_listed_once_and_none_is_lost(served: Served) -> None:
    """Also of tokens that are a part of a character, that come at once, or are held back while they may be a tag."""
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "tools": [LOOK], "stop": "END"}
    for texts in (["é<tool_", *"x€ ", "b"], [f"a\n{CALL}b\n", f"{CALL}", "cEND"], [*f"a{CALL}"]):
        served.says(*texts)
        answer = await served.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], logprobs=True, stop="END"
        )
        expected = [token.token for token in answer.choices[0].logprobs.content]
        body, events = await whole_and_events(served, **more)
        parts = [item["content"][0] for item in body["output"] if item["type"] == "message"]
        entries = [token for part in parts for token in part["logprobs"]]
        listed = [token["token"] for token in entries]
        deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
        assert entries == [token for delta in deltas for token in delta]
        if CALL not in "".join(texts):
            assert listed == expected
        else:
            assert len(listed) <= len(expected) and listed[0] == "a"


async def test_an_answer_keeps_logprobs_as_json(served: Served) -> None:
    """Objects for those of a long answer would take more memory; and what is written at a time is short."""
    answer, count = served.encode("a"), 400
    served.core.script = lambda request: [answer] * count
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    tracemalloc.start()
    try:
        async with served.http.stream(
            "POST", "/v1/responses", json={"input": "hello", "stream": True, **more}
        ) as reply:
            size = sum([len(block) async for block in reply.aiter_raw()])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 5 * 400 * 21 * 30 and peak < size


async def test_the_form_of_the_text_and_the_tools_that_count(served: Served) -> None:
    class Shape(BaseModel):
        colour: str

    served.says(*'{"colour": "red"}END')
    more: Any = {"model": "tiny", "input": "hello", "extra_body": {"stop": "END"}}
    parsed = await served.openai.responses.parse(text_format=Shape, **more)
    assert parsed.output_parsed == Shape(colour="red") and "colour" in served.core.requests[-1].grammar
    async with served.openai.responses.stream(text_format=Shape, **more) as stream:
        assert (await stream.get_final_response()).output_parsed == Shape(colour="red")
    served.says(*CALL)
    near = LOOK | {"name": "near"}
    for choice, names in (
        ({"type": "function", "name": "near"}, {"near"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}, {"look"}),
        ("required", {"look", "near"}),
    ):
        reply = await served.http.post(
            "/v1/responses", json={"input": "hello", "tools": [LOOK, near], "tool_choice": choice}
        )
        assert reply.status_code == 200, reply.text
        grammar = served.core.requests[-1].grammar
        assert {name for name in ("look", "near") if name in grammar} == names


def user(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation in 'input'"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "stores nothing"),
        ({"background": True}, "background", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tool_choice": {"type": "function", "name": "far"}, "tools": [LOOK]}, "tool_choice", "not in 'tools'"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "far"}]}, "tools": [LOOK]},
         "tool_choice", "not in 'tools'"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]", "`store: false`"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0]", "`call_id`"),
        ({"input": [user({"type": "input_image", "file_id": "1"})]}, "input[0].content[0]", "`image_url`"),
        ({"input": [user({"type": "refusal", "refusal": "no"})]}, "input", "refusal"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "`schema`"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].type", "send one of function"),
        ({"top_logprobs": 1}, "top_logprobs", "'message.output_text.logprobs' in 'include'"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", "the last event"),
        ({"max_tokens": 3}, "max_tokens", "not supported"),
        ({"response_format": {"type": "text"}}, "response_format", "not supported"),
        # What a chat completion refuses, too, by the names of this one's fields.
        ({"input": "hello " * 600}, "input", "maximum context length"),
        ({"input": [user({"type": "input_image", "image_url": "data:,"})]}, "input", "image 1: "),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"title": "x" * MAX_GRAMMAR}}}},
         "text.format", "more than 100000 bytes"),
    ],
)  # fmt: skip
async def test_what_it_does_not_offer_is_a_400_that_names_it(
    served: Served, fields: dict[str, Any], param: str, says: str
) -> None:
    reply = await served.http.post("/v1/responses", json={"input": "hello", **fields})
    assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(("retry", "code"), [(True, "server_error"), (False, "invalid_prompt")])
async def test_a_failure_in_the_middle_is_an_event(served: Served, retry: bool, code: str) -> None:
    served.core.hold = True
    async with served.openai.responses.stream(model="tiny", input="hello") as stream:
        await served.core.end(await served.core.has_requests(), "error", Problem("Too complex.", retry))
        events = [event async for event in stream]
    assert events[-1].type == "response.failed" and events[-1].response.error.message == "Too complex."
    assert events[-1].response.error.code == code
