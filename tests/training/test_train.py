"""The recipe trains, stops, goes on where it stopped, and publishes a directory that loads."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from training import data, pool, train

SETTINGS = train.Settings(
    steps=4, patches=400, warmup=2, alone=1, pool=pool.CHUNK, pool_start=pool.CHUNK, every=2, held_out=8, ema=0.5
)


@pytest.fixture(autouse=True)
def muon_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon rounds to bfloat16, with which a step takes two seconds on a CPU without its instructions."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)


def test_it_trains_stops_resumes_and_publishes(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    first = train.Trainer(SETTINGS, work, "cpu")
    assert not first.resume()
    first.settings = dataclasses.replace(SETTINGS, steps=2)
    train.train(first, out, workers=1)

    second = train.Trainer(SETTINGS, work, "cpu")
    assert second.resume() and second.step == 2
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name
    train.train(second, out, workers=1)
    assert second.step == 4
    assert len((work / "log.jsonl").read_text().splitlines()) == 2

    model, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert AutoProcessor.from_pretrained(out).video_processor.num_frames == 8
    assert not [path for path in tmp_path.iterdir() if path not in (work, out)]


@pytest.mark.parametrize("alone", [0, 1000])
def test_a_few_steps_lower_the_loss(tmp_path, alone):
    settings = dataclasses.replace(SETTINGS, steps=1000, alone=alone, lr=3e-3)
    trainer = train.Trainer(settings, tmp_path, "cpu")
    rng = train.np.random.default_rng(0)
    samples = [trainer.writer.sample((data.make_item(seed),), rng) for seed in range(8)]
    losses = [sum(trainer.train_step(samples)) for _ in range(10)]
    assert losses[-1] < 0.6 * losses[0]


def test_the_learning_rate_rises_stays_and_falls(tmp_path):
    settings = dataclasses.replace(SETTINGS, steps=1000, warmup=100, decay=0.3, lr=1.0)
    trainer = train.Trainer(settings, tmp_path, "cpu")
    rates = []
    for trainer.step in (0, 49, 99, 500, 850, 1000):
        rates.append(trainer.learning_rate())
    assert rates == pytest.approx([0.01, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_variations_keep_their_labels_true():
    item = data.Item(
        "red", "square", "left", torch.arange(4, dtype=torch.uint8).view(1, 1, 1, 4).expand(6, 3, 28, 4), 0.5
    )
    seen = set()
    for seed in range(60):
        other = data.varied(item, train.np.random.default_rng(seed))
        mirrored = bool((other.frames[0, 0, 0] == item.frames[0, 0, 0].flip(0)).all())
        assert other.motion in ({"right", "left"} if len(other.frames) == 6 else {None}) | {"still"}
        seen.add((mirrored, other.motion))
    assert {motion for _, motion in seen} == {"left", "right", "still", None}


def test_a_moment_is_one_temporal_patch():
    item = data.Item("red", "square", "left", torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 3, 28, 28))
    moments = [data.moment(item, train.np.random.default_rng(seed)) for seed in range(30)]
    assert {tuple(one.frames[:, 0, 0, 0].tolist()) for one in moments} == {(0, 1), (2, 3)}
