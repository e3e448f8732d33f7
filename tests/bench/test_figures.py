"""The figures of a run whose outcomes are known, against numpy and by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mini_engine.bench.serving.client import Outcome
from mini_engine.bench.serving.figures import Measures, best_second, failures, figures_of, tokens_by_second
from mini_engine.bench.serving.load import ClientLoad, Run
from mini_engine.bench.serving.table import describe

IDLE = ClientLoad(0.1, 0.0001, 0.001)


def outcome(number: int, begun: float, chunks: list[float], tokens: int, **more) -> Outcome:
    """A request that was answered; `chunks` are seconds after its begin, and it ends with the last of them."""
    moments = [begun + chunk for chunk in chunks]
    more = {"ended": moments[-1] if moments else begun, "counted_by": "server", **more}
    return Outcome(number, begun, chunks=moments, output_tokens=tokens, prompt_tokens=10, **more)


def by_hand() -> list[Outcome]:
    return [
        outcome(0, 100.0, [0.5, 0.75, 1.0], 5, right=True, stages={"fetch": 0.1, "other": 0.3}),
        outcome(1, 100.5, [0.5], 1, right=False, stages={"fetch": 0.3, "other": 0.1}),
        outcome(2, 101.75, [0.25, 1.25], 2),
        outcome(3, 101.75, [0.1], 1, error="broken", ended=101.9),
        outcome(4, 101.8, [0.1], 1, cancelled=True, ended=102.5),
    ]


def test_by_hand():
    run = Run(by_hand(), 100.0, 4.0, IDLE)
    found = figures_of(run, Measures(goodput={"ttft": 400.0}))
    assert (found["completed"], found["failed"], found["cancelled"]) == (3, 1, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 8)
    assert found["request_throughput"] == 0.75 and found["output_throughput"] == 2.0
    assert found["total_token_throughput"] == 9.5 and found["request_goodput"] == 0.25
    assert found["mean_ttft_ms"] == pytest.approx(1250 / 3) and found["median_ttft_ms"] == 500
    assert found["mean_tpot_ms"] == pytest.approx((500 / 4 + 1000) / 2)  # the second has no TPOT
    assert found["mean_itl_ms"] == pytest.approx((250 + 250 + 1000) / 3)
    assert found["mean_e2el_ms"] == pytest.approx((1000 + 500 + 1250) / 3)
    assert tokens_by_second(run) == pytest.approx([5 * 2 / 3, 5 / 3 + 1, 1, 1])
    assert found["max_concurrent_requests"] == 3  # 2, 3 and 4, when 1 is done
    assert found["accuracy"] == {"right": 1, "known": 2, "share": 0.5}
    assert found["stages_ms"]["fetch"]["mean"] == 200 and found["stages_ms"]["other"]["share"] == 0.5


def test_percentiles_and_spread_are_numpys():
    rng = random.Random(4)
    outcomes = [outcome(i, i / 9, sorted(rng.uniform(0, 3) for _ in range(5)), rng.randint(2, 9)) for i in range(57)]
    found = figures_of(Run(outcomes, 0.0, 9.0, IDLE), Measures(percentiles=[1, 25, 99.9]))
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
    assert figures_of(Run(by_hand(), 100.0, 1.0, IDLE), Measures(goodput=limits))["request_goodput"] == good


def test_a_goodput_of_nothing_is_shown():
    measures = Measures(goodput={"ttft": 1.0})
    text = describe(figures_of(Run(by_hand(), 100.0, 1.0, IDLE), measures), measures, "none good")
    assert f"{'Request goodput (req/s):':<40} 0.00" in text.splitlines()
    assert "goodput" not in describe(figures_of(Run(by_hand(), 100.0, 1.0, IDLE), Measures()), Measures(), "no limits")


def test_nothing_was_answered():
    measures = Measures()
    found = figures_of(Run([outcome(0, 1.0, [], 0, error="no")], 1.0, 0.5, IDLE), measures)
    assert found["completed"] == 0 and found["mean_ttft_ms"] is None and found["accuracy"] is None
    assert "Mean TTFT (ms):" + " " * 26 + "-" in describe(found, measures, "nothing")


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (IDLE, None),
        (ClientLoad(0.9, 0, 0), "The client was a bottleneck"),
        (ClientLoad(0.5, 0.2, 0.2), "The client was a bottleneck"),
        (ClientLoad(0.04, 0.2, 0.2), "The host is busy: the client's loop woke up late"),
    ],
)
def test_a_client_that_was_late_says_why(client: ClientLoad, said: str | None):
    text = describe(figures_of(Run(by_hand(), 100.0, 4.0, client), Measures()), Measures(), "client")
    for sentence in ("The client was a bottleneck", "The host is busy: the client's loop woke up late"):
        assert (sentence in text) is (sentence == said)


def test_the_best_second_begins_anywhere_and_takes_a_second():
    late = Run([outcome(0, 10.0, [0.1, 0.9, 1.1, 1.8, 2.5], 50)], 10.0, 2.5, IDLE)
    assert best_second(late) == 30 > max(tokens_by_second(late))  # 0.9, 1.1 and 1.8
    short = Run([outcome(0, 10.0, [0.1, 0.2], 50)], 10.0, 0.2, IDLE)
    assert best_second(short) is None
    text = describe(figures_of(short, Measures()), Measures(), "short")
    assert f"{'Peak output token throughput (tok/s):':<40} -" in text


def test_only_the_first_distinct_errors_are_told():
    outcomes = [outcome(number, 0.0, [], 0, error=f"error {number % 8}") for number in range(20)]
    told = failures(outcomes)
    assert told[:2] == ["3 of 20 requests: error 0", "3 of 20 requests: error 1"]
    assert len(told) == 6 and told[-1] == "6 requests: 3 other errors"
