"""Client libraries as people use them, unchanged, against a running server: structured answers and tools.

Each is imported by its test: together they take seven seconds, in both processes of a run if it were above.
"""

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from mini_engine.demo import videos
from tests.support.client import image_url
from tests.support.running_server import RunningServer


class Scene(BaseModel):
    """What an image shows."""

    colour: Literal["red", "green", "blue"]
    shape: Literal["circle", "square"]


PROMPT: list[Any] = [{"role": "user", "content": "Describe it."}]
TOOL = openai.pydantic_function_tool(Scene)
ONCE: Any = {"parallel_tool_calls": False}  # a model without training could call until its length is reached


def test_openai_parses_into_a_model(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}", api_key="none") as client:
        answer = client.chat.completions.parse(model=server.model, messages=PROMPT, response_format=Scene)
        assert isinstance(answer.choices[0].message.parsed, Scene)
        asked: dict[str, Any] = {"model": server.model, "tools": [TOOL], "tool_choice": TOOL, **ONCE}
        with client.chat.completions.stream(messages=PROMPT, **asked) as events:
            (call,) = events.get_final_completion().choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Scene)
        said = client.chat.completions.create(messages=PROMPT, **asked).choices[0].message
        image = {"type": "image_url", "image_url": {"url": image_url(videos.render_image(1))}}
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": [image]}
        reply = client.chat.completions.create(messages=[*PROMPT, said, result], **asked | {"tool_choice": "auto"})
        assert reply.choices[0].message.content and reply.usage.prompt_tokens_details.image_tokens > 0


async def test_pydantic_ai(server: RunningServer) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:
        model = OpenAIChatModel(server.model, provider=OpenAIProvider(openai_client=client))
        assert isinstance((await Agent(model, output_type=Scene).run("Describe it.")).output, Scene)


def test_langchain(server: RunningServer) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{server.url}", api_key="none", model=server.model)  # type: ignore[arg-type]
    assert isinstance(chat.with_structured_output(Scene).invoke("Describe it."), Scene)
    (call,) = chat.bind_tools([Scene], tool_choice="required", **ONCE).invoke("Describe it.").tool_calls
    assert Scene(**call["args"])


@pytest.mark.filterwarnings("ignore")  # its own about pydantic, by release
def test_litellm(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # not from GitHub
    import litellm

    at: dict[str, Any] = {"model": f"openai/{server.model}", "api_base": f"{server.url}", "api_key": "none"}
    answer: Any = litellm.completion(messages=PROMPT, response_format=Scene, **at)
    assert Scene.model_validate_json(answer.choices[0].message.content)
