"""Requests as clients write them: streaming, sampling, stops, local files, and what is refused and how."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from mini_engine.demo import videos
from tests.e2e.asked import ask_video
from tests.e2e.running_server import RunningServer, message


@pytest.fixture(scope="module")
def one():
    return ask_video(5, "describe")


def post(server: RunningServer, path: str, body: bytes) -> Any:
    """What the server says to `body`, for which the openai client has no call."""
    url, headers = server.url.removesuffix("/v1") + path, {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120) as response:
        return json.load(response)


def test_streaming_gives_the_same_words(server, one):
    stream = server.client.chat.completions.create(
        model=server.model, messages=[message(one.text, one.urls)], temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == one.answer
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens > 1 and not chunks[-1].choices


def test_usage_and_finish_reason(server, one):
    reply = server.client.chat.completions.create(
        model=server.model, messages=[message(one.text, one.urls)], temperature=0, max_tokens=2
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 2
    assert reply.usage.prompt_tokens > 20
    assert one.answer.startswith(reply.choices[0].message.content)


def test_a_stop_string_ends_the_answer_before_it(server, one):
    words = one.answer.split()
    reply = server.client.chat.completions.create(
        model=server.model, messages=[message(one.text, one.urls)], temperature=0, stop=[words[2]]
    )
    assert reply.choices[0].message.content == " ".join(words[:2]) + " "
    assert reply.choices[0].finish_reason == "stop"


def test_a_seed_gives_the_same_tokens_again(server):
    def sample(seed: int) -> str:
        reply = server.client.chat.completions.create(
            model=server.model, messages=[message("tell me", [])], temperature=2, seed=seed, max_tokens=24
        )
        return reply.choices[0].message.content

    first = sample(1)
    assert sample(1) == first
    assert any(sample(seed) != first for seed in (2, 3, 4))


def test_several_choices_with_a_bias_and_the_logprobs_of_their_tokens(server):
    reply = server.client.chat.completions.create(
        model=server.model, messages=[message("tell me", [])], temperature=0, max_tokens=4, n=2, seed=1,
        logit_bias={"70": 100}, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    forced = post(server, "/detokenize", json.dumps({"tokens": [70] * 4}).encode())["prompt"]
    assert [choice.message.content for choice in reply.choices] == [forced] * 2
    for choice in reply.choices:
        assert len(choice.logprobs.content) == 4 and choice.finish_reason == "length"
        for token in choice.logprobs.content:
            likeliest = [one.logprob for one in token.top_logprobs]
            assert len(likeliest) == 3 and likeliest == sorted(likeliest, reverse=True)
            assert token.logprob <= likeliest[0] <= 0


def test_local_files_below_the_allowed_root(server, media_root):
    clip = videos.render(3 * 10**9, colour="red", motion="up")
    (media_root / "a clip.mp4").write_bytes(videos.encode(clip))
    assert server.ask("What colour is it?", [("video_url", f"file://{media_root}/a%20clip.mp4")]) == "red"


def test_a_conversation_as_token_ids_has_the_same_completion(server):
    chat = server.ask("hello", [], max_tokens=8)
    tokens = post(server, "/tokenize", json.dumps({"messages": [message("hello", [])]}).encode())["tokens"]
    prompts = [tokens, tokens[:5]]
    reply = server.client.completions.create(model=server.model, prompt=prompts, temperature=0, max_tokens=8)
    assert reply.choices[0].text == chat
    assert len(reply.choices) == 2
    stream = server.client.completions.create(
        model=server.model, prompt=prompts, temperature=0, max_tokens=8, stream=True, logprobs=1
    )
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in reply.choices]
