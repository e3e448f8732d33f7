"""The bundled weights: they load, they are small enough, and they look at the pixels.

`tests/e2e/test_answers.py` asks about fresh videos, two of them, and reversed ones.
"""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from mini_engine.demo import videos
from training import codecs, evaluate, questions
from training.evaluate import FRESH_SEEDS
from training.model import WEIGHTS

SEEDS = range(FRESH_SEEDS + 10_000_000, FRESH_SEEDS + 10_000_005)  # used by no other test or table
DESCRIBE, MOTION = "Describe the video.", "Which way does it move?"


@pytest.fixture(scope="module")
def ask():
    processor = AutoProcessor.from_pretrained(WEIGHTS)
    model = AutoModelForImageTextToText.from_pretrained(WEIGHTS).eval()
    return lambda media, text, **extra: evaluate.say(model, processor, media, text, **extra)


def test_weights_load_without_a_missing_key():
    model, info = AutoModelForImageTextToText.from_pretrained(WEIGHTS, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration" and model.dtype == torch.float32
    assert type(AutoProcessor.from_pretrained(WEIGHTS)).__name__ == "Qwen2_5_VLProcessor"
    assert (WEIGHTS / "model.safetensors").stat().st_size <= 12_000_000


def test_four_ranks_divide_the_model():
    config = json.loads((WEIGHTS / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    sizes = [text[k] for k in ("num_attention_heads", "intermediate_size", "vocab_size", "hidden_size")]
    sizes += [vision[k] for k in ("num_heads", "intermediate_size", "hidden_size")]
    assert all(size % 4 == 0 for size in sizes)
    assert text["max_position_embeddings"] == 65536
    assert 0 < len(vision["fullatt_block_indexes"]) < vision["depth"]  # full and windowed blocks


@pytest.mark.parametrize("kinds", ["II", "VI", "IV"])
def test_two_items_are_described_in_order(ask, kinds):
    hits = []
    for seed in SEEDS[:4]:
        media = []
        for offset, kind in enumerate(kinds):
            is_video, of_item = kind == "V", seed + 100 * offset
            media.append(codecs.roundtrip(videos.render(of_item)) if is_video else videos.render_image(of_item))
        for order in (media, media[::-1]):
            asked = questions.ask(order, "list", seed)
            hits.append(ask(order, asked.text) == asked.answer)
    assert sum(hits) >= 0.8 * len(hits)


def test_a_repeated_frame_is_still(ask):
    for seed in SEEDS[:3]:
        clip = videos.render(seed, motion="left")
        frozen = dataclasses.replace(clip, motion="still", frames=clip.frames[[5] * len(clip.frames)])
        assert ask([codecs.roundtrip(frozen)], MOTION) == "still"
        assert ask([codecs.roundtrip(frozen)], DESCRIBE) == questions.phrase(frozen)


@pytest.mark.parametrize("num_frames", [4, 7, 16, 32])
def test_other_samplings(ask, num_frames):
    hits = []
    for seed in SEEDS[:5]:
        media = codecs.roundtrip(videos.render(seed, width=320, height=240))
        hits.append(ask([media], DESCRIBE, num_frames=num_frames) == questions.phrase(media))
    assert sum(hits) >= 0.8 * len(hits)


def test_text_that_it_was_not_taught_gets_an_answer(ask):
    clip = codecs.roundtrip(videos.render(SEEDS[1]))
    assert ask([], "hello") == questions.HELP
    for text in ("", "Wie spät ist es?", "世界 🙂 \x00", "0" * 300):
        assert isinstance(ask([], text), str)
        assert isinstance(ask([clip], text), str)


def test_the_table_has_every_codec_and_kind():
    results = evaluate.measure(WEIGHTS, 1, SEEDS[3])
    rows = evaluate.table(results).splitlines()
    assert len(rows) == 1 + len(videos.PAIRS) + 6
    assert all(len(hits) == 1 for kinds in results.values() for hits in kinds.values())
    assert rows[0].split() == list(questions.KINDS) and "vp9 in webm" in results
