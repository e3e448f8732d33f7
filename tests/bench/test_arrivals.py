"""The arrival process of `--request-rate`, against the distribution that it is to have."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from mini_engine.bench import cli
from mini_engine.bench.serving import measure
from mini_engine.bench.serving.arrivals import arrivals
from mini_engine.bench.serving.client import Outcome, Request
from mini_engine.bench.serving.load import ClientLoad, Run
from mini_engine.bench.serving.settings import settings_of
from mini_engine.bench.serving.target import Target
from mini_engine.demo import videos

COUNT = 4000
CRITICAL = 1.63 / math.sqrt(COUNT)  # of the Kolmogorov-Smirnov statistic at 1 %
CRITICAL_OF_TWO = 1.63 * math.sqrt(2 / COUNT)


def gaps(rate: float, burstiness: float, seed: int = 1) -> np.ndarray:
    return np.diff(arrivals(COUNT, rate, burstiness, random.Random(seed)), prepend=0.0)


def distance_to_exponential(values: np.ndarray, rate: float) -> float:
    expected = 1 - np.exp(-rate * np.sort(values))
    steps = np.arange(len(values) + 1) / len(values)
    return float(max(np.max(steps[1:] - expected), np.max(expected - steps[:-1])))


def distance_of(one: np.ndarray, other: np.ndarray) -> float:
    both = np.sort(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(values), both, side="right") / len(values) for values in (one, other)]
    return float(np.max(np.abs(shares[0] - shares[1])))


@pytest.mark.parametrize("rate", [0.5, 3.0, 200.0])
def test_without_burstiness_it_is_a_poisson_process(rate: float):
    assert distance_to_exponential(gaps(rate, 1.0), rate) < CRITICAL


def test_the_test_tells_other_processes_from_it():
    assert distance_to_exponential(gaps(3.0, 0.7), 3.0) > CRITICAL
    assert distance_to_exponential(gaps(3.3, 1.0), 3.0) > CRITICAL


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float):
    rate = 5.0
    found = gaps(rate, burstiness)
    wanted = np.random.default_rng(2).gamma(burstiness, 1 / (rate * burstiness), COUNT)
    assert distance_of(found, wanted) < CRITICAL_OF_TWO
    # The mean says the rate whatever the shape, the spread says the shape; five standard errors.
    spread = 1 / (rate * math.sqrt(burstiness))
    assert abs(found.mean() - 1 / rate) < 5 * spread / math.sqrt(COUNT)
    assert found.std() == pytest.approx(spread, rel=0.15)


def test_an_infinite_rate_is_all_at_once_and_a_seed_fixes_the_rest():
    assert arrivals(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]
    assert (gaps(2.0, 1.0, seed=3) == gaps(2.0, 1.0, seed=3)).all()
    assert (gaps(2.0, 1.0, seed=3) != gaps(2.0, 1.0, seed=4)).all()


def test_what_is_drawn_for_one_purpose_says_nothing_of_another(monkeypatch: pytest.MonkeyPatch):
    """Large media come in bursts as well, and are cancelled as often as others."""
    sent: list[tuple[Request, float]] = []

    def drive(requests: list[Request], starts: list[float], *_: object) -> Run:
        sent.extend(zip(requests, starts, strict=True))
        return Run([Outcome(request.number, error="not sent") for request in requests], 0.0, 1.0, ClientLoad(0, 0, 0))

    monkeypatch.setattr(measure, "drive", drive)
    flags = ["--launch", "", "--dataset-name", "random-mm", "--random-mm-bucket-config", "{(16,16,1):.6,(32,32,1):.4}",
             "--num-prompts", "400", "--num-warmups", "0", "--request-rate", "20", "--cancel-rate", "0.4",
             "--input-len", "40", "--random-range-ratio", "0.5", "--disable-tqdm"]  # fmt: skip
    with measure.prepared(settings_of(cli.parse(flags))) as ready:
        measure.measure(ready, Target("http://nowhere", "model", False), "title")
    samples = ready.prompts.samples
    drawn = [
        np.diff([start for _, start in sent], prepend=0.0),
        [request.cancel_after is not None for request, _ in sent],
        [videos.decode_image(sample.media[0].data).shape[0] for sample in samples],
        [len(sample.messages[0].text.split()) for sample in samples],
        [sample.output_tokens for sample in samples],
    ]
    found = np.corrcoef(np.array(drawn, float))
    assert np.abs(found - np.eye(len(drawn))).max() < 0.2, f"four standard deviations: {found}"
