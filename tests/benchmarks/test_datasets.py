"""What the data sets make of the flags: counts, repeats, and records of every form."""

import base64
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks import serve
from benchmarks.cli import parse
from benchmarks.datasets import Prompt, Prompts, load, repeat_order
from mini_engine.config import BUNDLED_MODEL, BUNDLED_NAME, ConfigError
from training import codecs, questions


def loaded(name: str, *flags: object) -> Prompts:
    defaults = ["--num-prompts", "4", "--num-warmups", "0", "--seed", "0"]
    args = parse(["--dataset-name", name, *defaults, *map(str, flags)])
    serve.check(args)
    return load(args, BUNDLED_NAME)


def media_of(prompt: Prompt) -> bytes:
    return base64.b64decode(prompt.urls[0].partition(",")[2])


@pytest.mark.parametrize(("ratio", "unique"), [(1.0, 40), (0.5, 20), (0.26, 10), (0.0, 1)])
def test_the_unique_ratio_by_counting(ratio: float, unique: int):
    order = repeat_order(40, ratio, np.random.default_rng(5))
    assert len(order) == 40 and len(set(order)) == unique
    firsts = [number for place, number in enumerate(order) if number not in order[:place]]
    assert firsts == list(range(unique)), "new ones are numbered as they come"


def test_media_are_repeated_and_warm_ups_have_their_own():
    found = loaded("synthetic-video", "--num-prompts", 8, "--num-warmups", 2, "--unique-ratio", 0.5)
    urls = {url for prompt in found.measured for url in prompt.urls}
    warm = {url for prompt in found.warm_ups for url in prompt.urls}
    assert len(found.measured) == 8 and len(urls) == 4
    assert len(warm) == 2 and not warm & urls


def test_synthetic_prompts_hold_their_answers_and_follow_the_seed():
    one, same, other = (loaded("synthetic-video", "--seed", seed).measured for seed in (0, 0, 1))
    # Not the bytes: libx264 does not always make the same ones of the same frames.
    asked, again, others = ([(prompt.text, prompt.answer) for prompt in found] for found in (one, same, other))
    assert asked == again != others
    for prompt in one:
        assert len(codecs.decode(media_of(prompt))[0]) >= 8
        assert any(prompt.text in texts for texts in questions.PHRASINGS.values())
        assert prompt.answer and len(prompt.answer.split()) <= 6
    assert loaded("synthetic-image").measured[0].urls[0].startswith("data:image/png;base64,")


def test_random_mm_draws_sizes_by_weight():
    buckets = "{(64, 96, 1): 3.0, (48, 80, 4): 1.0, (32, 32, 2): 0.0}"
    flags = ["--num-prompts", 40, "--random-mm-bucket-config", buckets, "--random-mm-base-items-per-request", 2]
    found = loaded("random-mm", *flags).measured
    assert [len(prompt.urls) for prompt in found] == [2] * 40
    sizes: Counter[tuple[int, ...]] = Counter()
    for prompt in found:
        image, data = prompt.urls[0].startswith("data:image"), media_of(prompt)
        sizes[(codecs.decode_image(data)[None] if image else codecs.decode(data)[0]).shape[:3]] += 1
    assert set(sizes) == {(1, 64, 96), (4, 48, 80)}
    assert 22 <= sizes[1, 64, 96] <= 38, "three quarters of 40, within three standard deviations"


def test_random_texts_have_as_many_tokens_as_asked_for():
    count = AutoTokenizer.from_pretrained(BUNDLED_MODEL)

    def made(*flags: object) -> list[tuple[int, int]]:
        found = loaded("random", "--num-prompts", 12, "--random-input-len", 20, *flags).measured
        assert len({prompt.text for prompt in found}) == 12
        return [(len(count.encode(prompt.text)), prompt.output_tokens) for prompt in found]

    assert set(made("--random-prefix-len", 5, "--random-output-len", 3)) == {(25, 3)}
    lengths, outputs = zip(*made("--random-range-ratio", 0.5), strict=True)
    assert 10 <= min(lengths) < 20 < max(lengths) <= 30 and 64 <= min(outputs) < 128 < max(outputs) <= 192
    first, second = (prompt.text.split() for prompt in loaded("random", "--random-prefix-len", 50).measured[:2])
    assert first[:50] == second[:50] and first[50:] != second[50:]


def write(path: Path, records: list[dict]) -> str:
    text = json.dumps(records) if path.suffix == ".json" else "".join(json.dumps(one) + "\n" for one in records)
    path.write_text(text)
    return str(path)


def test_sharegpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "clip.mp4").write_bytes(b"a video")
    clip = "data:video/mp4;base64," + base64.b64encode(b"a video").decode()
    image = {"type": "image_url", "image_url": {"url": "https://example.com/1.png"}}
    question = {"type": "text", "text": "Which shape?"}
    records = [
        {"conversations": [{"from": "gpt", "value": "no question"}]},
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "<video>\nWhat is it?"},
                           {"from": "gpt", "value": "a red circle"}, {"from": "human", "value": "And?"}],
         "video": "clip.mp4"},
        {"messages": [{"role": "user", "content": [image, question]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "https://a/1.png"}, question]}]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}],
         "images": ["https://example.com/1.png", {"url": "https://example.com/2.png"}]},
    ]  # fmt: skip
    path = write(tmp_path / "records.json", records)
    flags = ["--dataset-path", path, "--sharegpt-output-len", 9]
    first, second, third, fourth = loaded("sharegpt", *flags, "--disable-shuffle").measured
    assert [turn["role"] for turn in first.messages] == ["system", "user"], "the prompt ends before the answer"
    assert first.urls == [clip] and first.text == "Be brief.\nWhat is it?"
    assert second.messages == records[2]["messages"] and third.urls == ["https://a/1.png"]
    assert fourth.urls == ["https://example.com/1.png", "https://example.com/2.png"]
    assert all(prompt.output_tokens == 9 and prompt.answer is None for prompt in (first, second, third, fourth))
    assert len({loaded("sharegpt", *flags, "--seed", seed).measured[0].text for seed in range(9)}) > 1
    assert len(loaded("sharegpt", *flags, "--num-prompts", 7).measured) == 7, "some are sent again"
    assert "some are sent again" in capsys.readouterr().err
    assert len(loaded("sharegpt", *flags, "--num-prompts", 7, "--no-oversample").measured) == 4


def test_warm_ups_of_files_show_other_media_than_the_measured_ones(tmp_path: Path):
    for name in "abcd":
        (tmp_path / f"{name}.mp4").write_bytes(name.encode())
    path = write(tmp_path / "r.jsonl", [{"prompt": "What?", "video": f"{name}.mp4"} for name in "abacd"])
    found = loaded("custom", "--num-prompts", 2, "--num-warmups", 3, "--dataset-path", path, "--disable-shuffle")
    assert [media_of(prompt) for prompt in found.measured + found.warm_ups] == [b"a", b"b", b"c", b"d"]


def test_lengths_of_answers(tmp_path: Path):
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a red circle moving left"}]
    path = write(tmp_path / "r.json", [{"conversations": turns}])
    assert 1 < loaded("sharegpt", "--dataset-path", path).measured[0].output_tokens < 12
    with pytest.raises(ConfigError, match="/no/such/model has none"):
        loaded("sharegpt", "--dataset-path", path, "--tokenizer", "/no/such/model")
    path = write(tmp_path / "c.jsonl", [{"prompt": "a"}, {"prompt": "b", "output_tokens": 5, "expected": "c"}])
    found = loaded("custom", "--num-prompts", 2, "--dataset-path", path, "--disable-shuffle").measured
    assert [(prompt.output_tokens, prompt.answer) for prompt in found] == [(128, None), (5, "c")]


@pytest.mark.parametrize(
    ("text", "said"), [("hello\n", "neither a JSON list nor JSON Lines"), ("{}\n", "no prompt under")]
)
def test_what_is_no_data_set_says_so(tmp_path: Path, text: str, said: str):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=said):
        loaded("custom", "--dataset-path", tmp_path / "bad.jsonl")
