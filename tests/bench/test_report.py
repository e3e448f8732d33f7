"""Percentiles, tables and the last line."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from mini_engine.bench.report import Latencies, Report, as_json, percentile, table


def test_percentiles_are_numpys():
    rng = random.Random(5)
    for count in (1, 2, 3, 10, 101):
        values = [rng.uniform(0, 9) for _ in range(count)]
        for share in (0, 0.01, 0.5, 0.9, 0.99, 1):
            assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def test_percentiles_by_hand():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_no_percentile_of_nothing(values: list[float], share: float):
    with pytest.raises(ValueError):
        percentile(values, share)


def test_latencies_are_in_milliseconds():
    assert Latencies.of([0.001, 0.003, 0.002]) == Latencies(3, 2.0, 2.8, 2.98)
    assert Latencies.of([]) == Latencies(0, None, None, None)


def test_table_aligns():
    lines = table(["name", "n", "ms"], [["a", 1, 0.5], ["longer", 100, None]]).splitlines()
    assert lines == ["name      n     ms", "a         1  0.500", "longer  100      -"]


def test_the_object_says_on_what_it_ran():
    found = json.loads(json.dumps(as_json({"regime": "core"}, Report({"x": 1}, ["it broke"]))))
    assert found["regime"] == "core" and found["figures"] == {"x": 1} and found["failures"] == ["it broke"]
    assert found["versions"]["mini-engine"] and found["hardware"]["cores"] >= 1
