"""What the data sets make of their settings: counts, repeats, and records of every form."""

from __future__ import annotations

import base64
import io
import json
import random
from collections import Counter
from pathlib import Path

import datasets
import pytest
from PIL import Image
from transformers import AutoTokenizer

from mini_engine.bench.datasets import MADE, READ, synthetic
from mini_engine.bench.datasets.loading import MAKERS, load
from mini_engine.bench.datasets.sample import DataSettings, Link, Medium, Sample, repeat_order
from mini_engine.bench.report import BenchError
from mini_engine.bench.serving.bodies import cancel_plan
from mini_engine.config import BUNDLED_MODEL, ConfigError
from mini_engine.demo import questions, videos


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Hugging Face's package keeps what it has read: not in the home directory, which may not be writable."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def settings(name: str, **more) -> DataSettings:
    return DataSettings(**{"name": name, "count": 4, "warm_ups": 0, "seed": 0, "output_tokens": None, **more})


def test_each_name_is_made_or_read():
    assert tuple(MAKERS) == MADE and not set(MADE) & set(READ)


# --- repeats


@pytest.mark.parametrize(("ratio", "unique"), [(1.0, 40), (0.5, 20), (0.26, 10), (0.0, 1)])
def test_the_unique_ratio_by_counting(ratio: float, unique: int):
    order = repeat_order(40, ratio, random.Random(5))
    assert len(order) == 40 and len(set(order)) == unique
    firsts = [number for place, number in enumerate(order) if number not in order[:place]]
    assert firsts == list(range(unique)), "new ones are numbered as they come"
    again = {number for place, number in enumerate(order) if number in order[:place]}
    assert len(again) >= min(40 - unique, unique) / 3, "and not always the same ones come again"


def test_media_are_repeated_and_warm_ups_have_their_own():
    found = load(settings("synthetic-video", count=8, warm_ups=2, unique_ratio=0.5))
    media = [medium for sample in found.samples for medium in sample.media]
    assert len(media) == 8 and len({id(medium) for medium in media}) == len({medium.data for medium in media}) == 4
    warm = {medium.data for sample in found.warm_ups for medium in sample.media}
    assert len(warm) == 2 and not warm & {medium.data for medium in media}


def test_synthetic_prompts_hold_their_answers_and_follow_the_seed():
    one, same, other = (load(settings("synthetic-video", count=3, seed=seed)).samples for seed in (0, 0, 1))
    # Not the bytes: libx264 does not always make the same ones of the same frames.
    asked, again, others = ([(a.messages[0].text, a.answer, sizes(a)) for a in found] for found in (one, same, other))
    assert asked == again != others
    for sample in one:
        assert sizes(sample)[0] >= 8
        assert any(sample.messages[0].text in texts for texts in questions.PHRASINGS.values())
        assert sample.answer and len(sample.answer.split()) <= 6
    assert load(settings("synthetic-image", count=1)).samples[0].media[0].mime == "image/png"


def test_what_is_asked_says_nothing_of_what_is_shown(monkeypatch: pytest.MonkeyPatch):
    def show(kind: str, seed: int) -> synthetic.Shown:  # without the work of drawing it
        scene = videos.make_scene(seed)
        return synthetic.Shown(Medium(b"", "video/mp4"), scene.colour, scene.shape, scene.motion)

    monkeypatch.setattr(synthetic, "show", show)
    samples = load(settings("synthetic-video", count=300)).samples
    for kind, answers in (("colour", videos.COLOURS), ("shape", videos.SHAPES), ("motion", videos.MOTIONS)):
        told = Counter(one.answer for one in samples if one.messages[0].text in questions.PHRASINGS[kind])
        assert len(told) == len(answers) and 40 < told.total() < 110, "each answer is right somewhere"


def sizes(sample: Sample) -> tuple[int, ...]:
    return videos.decode(sample.media[0].data)[0].shape


def test_random_mm_draws_sizes_by_weight():
    buckets = {(64, 96, 1): 3.0, (48, 80, 4): 1.0, (32, 32, 2): 0.0}
    found = load(settings("random-mm", count=40, buckets=buckets, items_per_prompt=2))
    assert [len(sample.media) for sample in found.samples] == [2] * 40
    sizes: Counter[tuple[int, ...]] = Counter()
    for sample in found.samples:
        for medium in sample.media:
            if medium.kind == "image":
                sizes[(*videos.decode_image(medium.data).shape[:2], 1)] += 1
            else:
                frames, _ = videos.decode(medium.data)
                sizes[(*frames.shape[1:3], len(frames))] += 1
    assert set(sizes) == {(64, 96, 1), (48, 80, 4)}
    assert 45 <= sizes[64, 96, 1] <= 72, "three quarters of 80, within three standard deviations"


def test_texts_have_no_media_and_are_no_two_alike():
    found = load(settings("text", count=50, output_tokens=7))
    assert len({sample.messages[0].text for sample in found.samples}) == 50
    assert all(not sample.shown and sample.output_tokens == 7 for sample in found.samples)


def test_random_texts_have_as_many_tokens_as_asked_for():
    count = AutoTokenizer.from_pretrained(BUNDLED_MODEL)

    def made(name: str, **more) -> list[tuple[int, int]]:
        found = load(settings(name, count=12, warm_ups=2, tokenizer="mini-engine-demo", **more))
        prompts = found.samples + found.warm_ups
        assert len({sample.messages[0].text for sample in prompts}) == 14
        return [(len(count.encode(sample.messages[0].text)), sample.output_tokens) for sample in prompts]

    assert set(made("text", input_tokens=300)) == {(300, 128)}
    assert set(made("random", input_tokens=20, prefix_tokens=5, output_tokens=3)) == {(25, 3)}
    lengths, outputs = zip(*made("random", input_tokens=20, output_tokens=10, range_ratio=0.5), strict=True)
    assert 10 <= min(lengths) < 20 < max(lengths) <= 30 and 5 <= min(outputs) < 10 < max(outputs) <= 15
    media = load(settings("random-mm", count=1, buckets={(32, 32, 1): 1.0}, input_tokens=40, tokenizer=BUNDLED_MODEL))
    assert len(media.samples[0].media) == 1 and len(count.encode(media.samples[0].messages[0].text)) == 40
    same = load(settings("random", count=2, input_tokens=9, prefix_tokens=50, tokenizer=BUNDLED_MODEL)).samples
    first, second = (sample.messages[0].text.split() for sample in same)
    assert first[:50] == second[:50] and first[50:] != second[50:]


def test_the_share_that_is_cancelled_by_counting():
    plan = cancel_plan([3] * 50 + [100] * 50, 0.3, 1)
    closed = [after for after in plan if after is not None]
    assert len(plan) == 100 and len(closed) == 30
    assert set(closed) <= set(range(1, 9)) and len(set(closed)) > 3
    assert all(after is None or after <= 3 for after in plan[:50])
    assert cancel_plan([5], 0.0, 1) == [None]


# --- records


def picture(seed: int = 1) -> bytes:
    return videos.encode_image(videos.render_image(seed, width=32, height=32))


def write(path: Path, records: list[dict]) -> str:
    text = json.dumps(records) if path.suffix == ".json" else "".join(json.dumps(one) + "\n" for one in records)
    path.write_text(text)
    return str(path)


def test_sharegpt(tmp_path: Path):
    (tmp_path / "clip.mp4").write_bytes(b"a video")
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    records = [
        {"conversations": [{"from": "gpt", "value": "no question"}]},
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "<video>\nWhat is it?"},
                           {"from": "gpt", "value": "a red circle"}, {"from": "human", "value": "And?"}],
         "video": "clip.mp4"},
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which shape?"}]}]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}],
         "images": ["https://example.com/1.png", "https://example.com/2.png"]},
    ]  # fmt: skip
    path = write(tmp_path / "records.json", records)
    found = load(settings("sharegpt", count=3, path=path, shuffle=False, output_tokens=9))
    assert found.notes == ["1 records hold no prompt and were passed over"]
    first, second, third = found.samples
    assert [turn.role for turn in first.messages] == ["system", "user"], "the prompt ends before the answer"
    assert first.messages[1].parts == (Medium(b"a video", "video/mp4"), "What is it?")
    assert second.messages[0].parts == (Link(url, "image"), "Which shape?")
    assert [part.url[-5:] for part in third.messages[0].parts[:2]] == ["1.png", "2.png"]
    assert all(sample.output_tokens == 9 and sample.answer is None for sample in found.samples)

    shuffles = [load(settings("sharegpt", count=3, path=path, output_tokens=1, seed=seed)) for seed in range(6)]
    assert len({tuple(sample.messages for sample in one.samples) for one in shuffles}) > 1
    more = load(settings("sharegpt", count=7, path=path, output_tokens=1))
    assert len(more.samples) == 7 and "3 prompts are there and 7 were asked for" in more.notes[-1]


@pytest.mark.parametrize("suffix", ["mp4", "png"])
def test_warm_ups_of_files_show_other_media_than_the_measured_ones(tmp_path: Path, suffix: str):
    for name in "abcd":
        (tmp_path / f"{name}.{suffix}").write_bytes(name.encode())
    kind = "video" if suffix == "mp4" else "image"
    path = write(tmp_path / "r.jsonl", [{"prompt": "What?", kind: f"{name}.{suffix}"} for name in "abcda"])
    few = load(settings("custom", count=2, warm_ups=2, path=path, shuffle=False))
    assert [sample.media[0].data for sample in few.samples + few.warm_ups] == [b"a", b"b", b"c", b"d"]
    assert not few.notes
    # The fifth record shows what the first one does.
    most = load(settings("custom", count=4, warm_ups=2, path=path, shuffle=False, output_tokens=9))
    assert [sample.media[0].data for sample in most.samples] == [b"a", b"b", b"c", b"d"]
    assert len({sample.media[0].data for sample in most.samples + most.warm_ups}) == 6
    assert [(sample.media[0].kind, sample.output_tokens) for sample in most.warm_ups] == [(kind, 9)] * 2
    once = load(settings("custom", count=9, path=path, shuffle=False, oversample=False))
    assert len(once.samples) == 5 and once.notes == ["5 prompts are there and 9 were asked for: each is sent once"]
    assert most.notes == ["no other records are left to warm up with: 2 of 2 warm-ups are made here"]
    texts = load(settings("custom", count=1, warm_ups=1, path=write(tmp_path / "t.jsonl", [{"prompt": "a"}])))
    assert texts.samples[0].messages != texts.warm_ups[0].messages and not texts.warm_ups[0].shown


def test_lengths_of_answers(tmp_path: Path):
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a red circle moving left"}]
    path = write(tmp_path / "r.json", [{"conversations": turns}])
    counted = load(settings("sharegpt", count=1, path=path, tokenizer=BUNDLED_MODEL)).samples[0].output_tokens
    assert 1 < counted < 12
    by_name = load(settings("sharegpt", count=1, path=path, tokenizer="mini-engine-demo")).samples[0]
    assert by_name.output_tokens == counted
    with pytest.raises(ConfigError, match="neither --tokenizer nor --model is given: give --tokenizer .* or the number "
                                          "itself by --sharegpt-output-len"):  # fmt: skip
        load(settings("sharegpt", count=1, path=path))
    with pytest.raises(ConfigError, match="and /no/such/model has none .*: give --tokenizer"):
        load(settings("sharegpt", count=1, path=path, tokenizer="/no/such/model"))
    path = write(tmp_path / "c.jsonl", [{"prompt": "a"}, {"prompt": "b", "output_tokens": 5, "expected": "c"}])
    found = load(settings("custom", count=2, path=path, shuffle=False)).samples
    assert [(sample.output_tokens, sample.answer) for sample in found] == [(128, None), (5, "c")]


def test_a_url_may_stand_bare_in_a_part(tmp_path: Path):
    """And the file may begin with the mark that some editors write."""
    part = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"messages": [{"role": "user", "content": [part]}]}]), encoding="utf-8-sig")
    (sample,) = load(settings("custom", path=str(path), count=1, output_tokens=1)).samples
    assert [one.url for one in sample.shown] == [part["image_url"]]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "a record's content is a list with a str"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "'video_url' without its URL"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "of the type 'audio': the types are text"),
        ({"prompt": "x", "output_tokens": "many"}, "output_tokens is 'many': use a whole number above 0, or --output"),
        ({"prompt": "x", "output_tokens": 0}, "output_tokens is 0: use a whole number above 0"),
    ],
)
def test_records_of_another_form_say_what_is_wrong(tmp_path: Path, record: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        load(settings("custom", path=write(tmp_path / "x.jsonl", [record])))


def test_hf_reads_local_parquet_with_its_media(tmp_path: Path):
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    rows = {"question": ["What?", "Which?"], "image": [Image.open(io.BytesIO(picture(seed))) for seed in (1, 2)]}
    table = Dataset.from_dict(rows, features=Features({"question": Value("string"), "image": ImageFeature()}))
    table.to_parquet(tmp_path / "train-00000-of-00001.parquet")
    found = load(settings("hf", count=2, path=str(tmp_path), split="train", shuffle=False, output_tokens=4)).samples
    assert [sample.messages[0].text for sample in found] == ["What?", "Which?"]
    for seed, sample in zip((1, 2), found, strict=True):
        shown = videos.decode_image(sample.media[0].data)
        assert (shown == videos.render_image(seed, width=32, height=32).pixels).all()
    shuffled = [load(settings("hf", count=2, path=str(tmp_path), output_tokens=4, seed=seed)) for seed in range(8)]
    assert {one.samples[0].messages[0].text for one in shuffled} == {"What?", "Which?"}


def test_hf_reads_arrow_files_and_folders_of_splits(tmp_path: Path):
    from datasets import Dataset

    for split in ("train", "test"):
        Dataset.from_dict({"prompt": [f"of {split}"]}).save_to_disk(tmp_path / split)
        (sample,) = load(settings("hf", count=1, path=str(tmp_path), split="train")).samples
        assert sample.messages[0].text == "of train"


def test_hf_reads_local_json_by_split(tmp_path: Path):
    write(tmp_path / "train.jsonl", [{"prompt": "of train"}])
    write(tmp_path / "test.jsonl", [{"prompt": "of test"}])
    for split in ("train", "test"):
        (sample,) = load(settings("hf", count=1, path=str(tmp_path), split=split)).samples
        assert sample.messages[0].text == f"of {split}"
    with pytest.raises(ConfigError, match="no file's name begins with 'validation': test.jsonl, train.jsonl"):
        load(settings("hf", path=str(tmp_path), split="validation"))


def test_a_subset_is_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="--hf-subset: .* is here and not on the hub"):
        load(settings("hf", path=write(tmp_path / "train.jsonl", [{"prompt": "a"}]), subset="x"))
    asked = []  # there is no hub here
    text = datasets.Features({"prompt": datasets.Value("string")})

    def load_dataset(*names: str, split: str, streaming: bool) -> datasets.IterableDataset:
        asked.append((*names, split))
        return datasets.IterableDataset.from_generator(lambda: iter([{"prompt": "a"}]), features=text)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load(settings("hf", path="some/set", subset="x", split="test", count=1)).samples) == 1
    assert asked == [("some/set", "x", "test")]


def test_what_cannot_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(settings("custom", path=str(tmp_path / "none.jsonl")))
    with pytest.raises(ConfigError, match="neither a JSON list nor an object on each line"):
        (tmp_path / "bad.jsonl").write_text("hello\n")
        load(settings("custom", path=str(tmp_path / "bad.jsonl")))
    with pytest.raises(ConfigError, match="an object on each line: line 3 column 12: "):
        (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": }\n')
        load(settings("custom", path=str(tmp_path / "bad.jsonl")))
    with pytest.raises(ConfigError, match="is no JSON: it is not text in UTF-8"):
        (tmp_path / "clip.mp4").write_bytes(b"\xb9\xff")
        load(settings("custom", path=str(tmp_path / "clip.mp4")))
    with pytest.raises(ConfigError, match="no record holds a prompt under messages.*; the last record has reply"):
        load(settings("custom", path=write(tmp_path / "empty.jsonl", [{"reply": "x"}])))
    with pytest.raises(ConfigError, match="a record's video 'gone.mp4' cannot be read"):
        load(settings("custom", path=write(tmp_path / "gone.jsonl", [{"prompt": "x", "video": "gone.mp4"}])))
    (tmp_path / "void").mkdir()
    (tmp_path / "x.csv").write_text("prompt\nhello\n")
    for name in ("void", "x.csv"):
        with pytest.raises(ConfigError, match="has no file ending in"):
            load(settings("hf", path=str(tmp_path / name)))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 this is no table")
    with pytest.raises(BenchError, match="cannot be loaded: .*local copy"):
        load(settings("hf", path=str(tmp_path / "x.parquet")))
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'mini-engine\[hf\]'"):
        load(settings("hf", path=str(tmp_path / "x.parquet")))
