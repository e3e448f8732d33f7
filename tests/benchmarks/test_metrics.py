"""The metrics of a run whose outcomes are known, against numpy and by hand."""

import pytest

from benchmarks.client import Outcome, Run
from benchmarks.metrics import best_second, compute, describe


def outcome(begun: float, chunks: list[float], tokens: int, **more) -> Outcome:
    """A request that was answered; `chunks` are seconds after its begin, and it ends with the last of them."""
    moments = [begun + chunk for chunk in chunks]
    more = {"ended": moments[-1] if moments else begun, **more}
    return Outcome(begun, chunks=moments, output_tokens=tokens, prompt_tokens=10, **more)


def by_hand(**more) -> Run:
    outcomes = [
        outcome(100.0, [0.5, 0.75, 1.0], 5, text="red ", stages={"fetch": 0.1, "other": 0.3}),
        outcome(100.5, [0.5], 1, text="blue", stages={"fetch": 0.3, "other": 0.1}),
        outcome(101.75, [0.25, 1.25], 2),
        outcome(101.75, [0.1], 1, error="broken", ended=101.9),
    ]
    return Run(outcomes, 100.0, 4.0, **more)


def test_by_hand():
    found = compute(by_hand(), ["red", "red", None, "red"], goodput={"ttft": 400.0})
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


@pytest.mark.parametrize(
    ("limits", "good"),
    [({"ttft": 300}, 1), ({"ttft": 500}, 3), ({"tpot": 200}, 2), ({"e2el": 1000}, 2), ({"ttft": 500, "tpot": 10}, 1)],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: dict[str, float], good: int):
    assert compute(by_hand(), goodput=limits)["request_goodput"] == good / 4


def test_a_client_that_was_the_bottleneck_says_so():
    for share, said in ((0.7, False), (0.9, True)):
        text = describe(compute(by_hand(cpu_share=share)))
        assert ("The client was a bottleneck" in text) is said


def test_nothing_was_answered():
    found = compute(Run([outcome(1.0, [], 0, error="no")], 1.0, 0.5))
    assert found["completed"] == 0 and found["mean_ttft_ms"] is None and found["accuracy"] is None
    assert ["Mean", "TTFT", "(ms):", "-"] in map(str.split, describe(found).splitlines())


def test_the_best_second_begins_anywhere_and_takes_a_second():
    chunks = [0.1, 0.9, 1.1, 1.8, 2.5]
    assert best_second(Run([outcome(10.0, chunks, 50)], 10.0, 2.5)) == 30  # 0.9, 1.1 and 1.8
    assert best_second(Run([outcome(10.0, chunks[:1], 50)], 10.0, 0.2)) is None
