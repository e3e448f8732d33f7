"""What the bundled model answers through the running server, and that it looks at the pixels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mini_engine.demo import questions, videos
from tests.e2e.asked import ask_image, ask_two, ask_video, image_url, video_url
from tests.e2e.running_server import RunningServer

OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}


def test_accuracy_on_two_hundred_fresh_videos(server):
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda seed: ask_video(1000 + seed), range(200)))
        answers = list(pool.map(lambda one: server.ask(one.text, one.urls), asked))
    wrong = [
        (one.codec, one.text, one.answer, got) for one, got in zip(asked, answers, strict=True) if got != one.answer
    ]
    assert {one.codec for one in asked} == {"h264", "mpeg4", "vp9"}
    assert len(wrong) <= 4, wrong


def test_accuracy_on_images(server):
    asked = [ask_image(seed) for seed in range(40)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: server.ask(one.text, one.urls), asked))
    assert sum(one.answer == got for one, got in zip(asked, answers, strict=True)) >= 39


@pytest.mark.parametrize("motion", OPPOSITE)
def test_reversed_frames_swap_the_direction(server, motion):
    right = 0
    for seed in range(4):
        clip = videos.render(2 * 10**9 + seed, motion=motion)
        text = questions.ask([clip], "motion", seed).text
        forward = server.ask(text, [("video_url", video_url(clip))])
        backward = server.ask(text, [("video_url", video_url(clip.reversed()))])
        right += (forward, backward) == (motion, OPPOSITE[motion])
    assert right >= 3


def test_one_repeated_frame_stands_still(server):
    clip = videos.render(2 * 10**9 + 7, motion="left").frozen()
    text = questions.ask([clip], "motion", 1).text
    assert server.ask(text, [("video_url", video_url(clip))]) == "still"


def test_an_image_and_a_video_in_one_prompt(server):
    picture, clip = videos.render_image(2 * 10**9 + 1), videos.render(2 * 10**9 + 2)
    question = questions.ask([picture, clip], "list", 0)
    assert (
        server.ask(question.text, [("image_url", image_url(picture)), ("video_url", video_url(clip))])
        == question.answer
    )


@pytest.mark.parametrize("text", ["hello", "こんにちは 🌍", "x" * 2000, "<|nonsense|> \x01 ﷽"])
def test_text_that_was_not_taught_gets_some_answer(server, text):
    assert isinstance(server.ask(text, [], max_tokens=16), str)


def test_two_items_are_described_in_order():
    pairs = [ask_two(seed) for seed in range(0, 16, 2)]
    with RunningServer("-tp", "2") as server:
        answers = [server.ask(one.text, one.urls) for one in pairs]
        swapped = [server.ask(one.text, one.urls[::-1]) for one in pairs[:3]]
    right = sum(answer == one.answer for answer, one in zip(answers, pairs, strict=True))
    assert right >= len(pairs) - 1, answers
    for answer, one in zip(swapped, pairs, strict=False):
        first, second = (part.partition(": ")[2] for part in one.answer.split("; "))
        assert answer == f"first: {second}; second: {first}"
