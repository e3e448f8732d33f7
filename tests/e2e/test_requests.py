"""Requests as clients write them: frames, token ids, several choices, and where their time went."""

import dataclasses
import time
from typing import Any

from mini_engine.demo import videos
from mini_engine.metrics import stage_seconds
from tests.support.client import ask_video, image_url, video_url
from tests.support.running_server import RunningServer, message


def post(server: RunningServer, path: str, body: dict) -> Any:
    """The response to `body`, for which the openai client has no call."""
    return server.client.post(server.base_url + path, body=body, cast_to=object)


def test_frames_of_a_video_are_answered_as_the_video(server):
    clip = videos.render(4 * 10**9, width=96, height=96, num_frames=16, fps=8)
    urls = [image_url(dataclasses.replace(clip, frames=frame[None])) for frame in clip.frames]
    sent = "data:video/jpeg;base64," + ",".join(url.partition(",")[2] for url in urls)
    times = {"timestamps": [index / 8 for index in range(16)]}
    answers = [
        server.ask("Describe the video.", [("video_url", url)], extra_body={"media_io_kwargs": {"video": more}})
        for url, more in ((video_url(clip), {"num_frames": 16}), (sent, {"num_frames": 16} | times))
    ]
    assert answers[0] == answers[1]


def test_a_conversation_as_token_ids_has_the_same_completion(server):
    chat = server.ask("hello", [], max_tokens=8)
    tokens = post(server, "/tokenize", {"messages": [message("hello", [])]})["tokens"]
    asked = {"model": server.model, "prompt": [tokens, tokens[:5]], "temperature": 0, "max_tokens": 8}
    reply = server.client.completions.create(**asked)
    assert reply.choices[0].text == chat
    texts = ["", ""]
    for chunk in server.client.completions.create(**asked, stream=True, logprobs=1):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in reply.choices]


def test_choices_of_one_request_share_its_prompt(server):
    question = ask_video(7, "describe")
    before = server.total("prefix_cache_hits_total")
    reply = server.client.chat.completions.create(
        model=server.model, messages=[message(question.text, question.urls)], n=4, temperature=0
    )
    answers = {choice.index: choice.message.content for choice in reply.choices}
    assert answers == dict.fromkeys(range(4), question.answer)
    assert server.total("prefix_cache_hits_total") >= before + 3 * 16


def test_timings_of_a_cold_and_a_cached_video(server):
    """The seconds in each stage, which are no more than the client's."""
    question, of_media = ask_video(7002, "describe"), {"media_decode", "process", "encode"}
    stages = {"fetch", "transport", "queue", "prefill", "generation"}
    for expected in (stages | of_media, stages):
        started = time.monotonic()
        fields: dict[str, Any] = {"model": server.model, "messages": [message(question.text, question.urls)]}
        fields["extra_body"] = {"return_timings": True, "ignore_eos": True}
        reply = server.client.chat.completions.create(**fields, temperature=0, max_tokens=64)
        spent = reply.model_extra["metrics"]
        assert sum(spent.values()) <= time.monotonic() - started and min(spent.values()) >= 0, spent
        assert list(spent) == [*stage_seconds, "other"]
        assert {stage for stage in stages | of_media if spent[stage]} == expected, spent
