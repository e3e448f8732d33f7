"""Answers of the bundled model through the running server, which depend on the pixels."""

import dataclasses
import json

import jsonschema_rs
import openai
import pytest

from mini_engine.demo import videos
from tests.support.client import Question, answers_of, ask_image, ask_two, ask_video, data_url, video_url
from tests.support.clips import encode_in
from tests.support.running_server import RunningServer, message
from training import questions

OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}


def wrong_answers(server: RunningServer, asked: list[Question], **more: object) -> list[tuple[Question, str]]:
    answers = zip(asked, answers_of(server, asked, **more), strict=True)
    return [(question, answer) for question, answer in answers if answer != question.answer]


def test_accuracy_on_fresh_videos_and_images(server):
    asked = [ask_video(1000 + seed) for seed in range(24)]
    wrong = wrong_answers(server, asked)
    assert len(wrong) <= 1, wrong
    wrong = wrong_answers(server, [ask_image(seed) for seed in range(12)])
    assert len(wrong) <= 1, wrong


def test_two_items_are_described_in_order(server):
    pairs = [ask_two(seed) for seed in range(0, 16, 2)]
    assert len(wrong_answers(server, pairs)) <= 1
    for question in pairs[:3]:
        first, second = (part.partition(": ")[2] for part in question.answer.split("; "))
        assert server.ask(question.text, question.urls[::-1]) == f"first: {second}; second: {first}"


def test_hdr_is_seen_in_its_colours(server):
    for seed, transfer in enumerate((16, 18)):  # HDR10, HLG
        clip = videos.render(2 * 10**9 + seed, colour="red")
        asked = questions.ask([clip], "colour", seed)
        assert server.ask(asked.text, [("video_url", data_url(encode_in(transfer, clip.frames)))]) == "red"


@pytest.mark.parametrize("motion", OPPOSITE)
def test_reversed_frames_swap_the_direction(server, motion):
    right = 0
    for seed in range(4):
        clip = videos.render(2 * 10**9 + seed, motion=motion)
        text = questions.ask([clip], "motion", seed).text
        forward = server.ask(text, [("video_url", video_url(clip))])
        backward = server.ask(text, [("video_url", video_url(dataclasses.replace(clip, frames=clip.frames[::-1])))])
        right += (forward, backward) == (motion, OPPOSITE[motion])
    assert right >= 3


def test_answers_under_a_grammar_are_right_and_in_its_form(server):
    """Even where end-of-sequence tokens are ignored, or barred; and JSON, which the model was not trained to write."""
    things = f"an? ({'|'.join(videos.COLOURS)}) ({'|'.join(videos.SHAPES)})"
    form = {"regex": things + " (moving (left|right|up|down)|standing still)"}
    asked = [ask_video(3000 + seed, "describe") for seed in range(12)]
    assert not wrong_answers(server, asked, structured_outputs=form, ignore_eos=True, min_tokens=40)
    enums = {"colour": {"enum": list(videos.COLOURS)}, "shape": {"enum": list(videos.SHAPES)}}
    schema = {"type": "object", "properties": enums, "required": list(enums), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    more = {"response_format": form, "n": 2, "logprobs": True}
    for question in asked[:4]:
        assert jsonschema_rs.is_valid(schema, json.loads(server.ask(question.text, question.urls, **more)))
    item = {"properties": {"count": {"type": "integer"}, "size": {"type": "number"}}, "required": ["count", "size"]}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": {"type": "object", **item}}}
    hot = {"response_format": form, "n": 16, "seed": 1, "temperature": 1.5, "max_tokens": 90}
    for choice in server.client.chat.completions.create(
        model=server.model, messages=[message(asked[0].text, asked[0].urls)], **hot
    ).choices:
        assert choice.finish_reason == "stop" and jsonschema_rs.is_valid(item, json.loads(choice.message.content))
    more = {"structured_outputs": {"grammar": "start: <|unknown|>"}}  # only the engine can tell
    with pytest.raises(openai.BadRequestError, match="grammar of this request .* unknown special token"):
        server.ask("hello", [], extra_body=more)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "allowed"), [("int8", 0), ("int4", 10)])
def test_quantised_weights_answer_as_float32(server, bits, allowed):
    """`allowed` answers may differ. The server of `test_scarcity.py` answers fewer questions in the default run."""
    asked = [ask_video(20_000 + seed) for seed in range(200)]
    with RunningServer("--quantization", bits) as quantised:
        answers = zip(answers_of(server, asked), answers_of(quantised, asked), strict=True)
        differing = [(dense, answer) for dense, answer in answers if dense != answer]
    assert len(differing) <= allowed, differing
