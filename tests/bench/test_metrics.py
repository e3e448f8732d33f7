"""The metrics of a run whose outcomes are known, against numpy and by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mini_engine.bench.client import Outcome, Run
from mini_engine.bench.metrics import Wanted, best_second, compute, describe
from mini_engine.bench.report import table


def outcome(number: int, begun: float, chunks: list[float], tokens: int, **more) -> Outcome:
    """A request that was answered; `chunks` are seconds after its begin, and it ends with the last of them."""
    moments = [begun + chunk for chunk in chunks]
    more = {"ended": moments[-1] if moments else begun, **more}
    return Outcome(number, begun, chunks=moments, output_tokens=tokens, prompt_tokens=10, **more)


def by_hand(**more) -> Run:
    outcomes = [
        outcome(0, 100.0, [0.5, 0.75, 1.0], 5, right=True, stages={"fetch": 0.1, "other": 0.3}),
        outcome(1, 100.5, [0.5], 1, right=False, stages={"fetch": 0.3, "other": 0.1}),
        outcome(2, 101.75, [0.25, 1.25], 2),
        outcome(3, 101.75, [0.1], 1, error="broken", ended=101.9),
    ]
    return Run(outcomes, 100.0, 4.0, **more)


def test_by_hand():
    found = compute(by_hand(), Wanted(goodput={"ttft": 400.0}))
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 8)
    assert found["request_throughput"] == 0.75 and found["output_throughput"] == 2.0
    assert found["total_token_throughput"] == 9.5 and found["request_goodput"] == 0.25
    assert found["mean_ttft_ms"] == pytest.approx(1250 / 3) and found["median_ttft_ms"] == 500
    assert found["mean_tpot_ms"] == pytest.approx((500 / 4 + 1000) / 2)  # the second has no TPOT
    assert found["mean_itl_ms"] == pytest.approx((250 + 250 + 1000) / 3)
    assert found["mean_e2el_ms"] == pytest.approx((1000 + 500 + 1250) / 3)
    assert found["max_concurrent_requests"] == 2
    assert found["accuracy"] == {"right": 1, "known": 2, "share": 0.5}
    assert found["stages_ms"]["fetch"]["mean"] == 200 and found["stages_ms"]["other"]["share"] == 0.5


def test_percentiles_and_spread_are_numpys():
    rng = random.Random(4)
    outcomes = [outcome(i, i / 9, sorted(rng.uniform(0, 3) for _ in range(5)), rng.randint(2, 9)) for i in range(57)]
    found = compute(Run(outcomes, 0.0, 9.0), Wanted(percentiles=[1, 25, 99.9]))
    values = {
        "ttft": [one.chunks[0] - one.begun for one in outcomes],
        "e2el": [one.chunks[-1] - one.begun for one in outcomes],
        "itl": np.concatenate([np.diff(one.chunks) for one in outcomes]),
        "tpot": [(one.chunks[-1] - one.chunks[0]) / (one.output_tokens - 1) for one in outcomes],
    }
    for metric, seconds in values.items():
        assert found[f"std_{metric}_ms"] == pytest.approx(1000 * np.std(seconds), abs=1e-5)
        for share in (1, 25, 99.9):
            assert found[f"p{share}_{metric}_ms"] == pytest.approx(1000 * np.percentile(seconds, share), abs=1e-5)


@pytest.mark.parametrize(
    ("limits", "good"),
    [({"ttft": 300}, 1), ({"ttft": 500}, 3), ({"tpot": 200}, 2), ({"e2el": 1000}, 2), ({"ttft": 500, "tpot": 10}, 1)],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: dict[str, float], good: int):
    assert compute(by_hand(), Wanted(goodput=limits))["request_goodput"] == good / 4


def test_a_goodput_of_nothing_is_shown():
    limits = Wanted(goodput={"ttft": 1.0})
    assert f"{'Request goodput (req/s):':<40} 0.00" in describe(compute(by_hand(), limits), limits, "").splitlines()
    assert "goodput" not in describe(compute(by_hand(), Wanted()), Wanted(), "no limits")


def test_nothing_was_answered():
    found = compute(Run([outcome(0, 1.0, [], 0, error="no")], 1.0, 0.5), Wanted())
    assert found["completed"] == 0 and found["mean_ttft_ms"] is None and found["accuracy"] is None
    assert "Mean TTFT (ms):" + " " * 26 + "-" in describe(found, Wanted(), "nothing")


@pytest.mark.parametrize(
    ("cpu_share", "lag", "said"),
    [
        (0.1, 0.0, None),
        (0.9, 0.0, "The client was a bottleneck"),
        (0.5, 0.2, "The client was a bottleneck"),
        (0.04, 0.2, "The host is busy"),
    ],
)
def test_a_client_that_was_late_says_why(cpu_share: float, lag: float, said: str | None):
    text = describe(compute(by_hand(cpu_share=cpu_share, lags=[lag]), Wanted()), Wanted(), "client")
    for sentence in ("The client was a bottleneck", "The host is busy"):
        assert (sentence in text) is (sentence == said)


def test_the_best_second_begins_anywhere_and_takes_a_second():
    chunks = [0.1, 0.9, 1.1, 1.8, 2.5]
    assert best_second(Run([outcome(0, 10.0, chunks, 50)], 10.0, 2.5)) == 30  # 0.9, 1.1 and 1.8
    assert best_second(Run([outcome(0, 10.0, chunks[:1], 50)], 10.0, 0.2)) is None


def test_table_aligns():
    lines = table(["name", "n", "ms"], [["a", 1, 0.5], ["longer", 100, None]]).splitlines()
    assert lines == ["name      n     ms", "a         1  0.500", "longer  100      -"]
