"""What counts as a step, from the tokens that an engine core sends."""

from __future__ import annotations

import pytest

from mini_engine.bench.engine_alone import Arrival, Generation
from mini_engine.bench.engine_step import WARM_UP_STEPS, Requests, engine_config, step_seconds
from mini_engine.bench.report import BenchError
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.messages import Outputs, RequestOutput


def arrival(when: float, tokens: dict[str, int], finish: bool = False) -> Arrival:
    outputs = [RequestOutput(name, [7] * count, "length" if finish else None) for name, count in tokens.items()]
    return Arrival(when, Outputs(outputs=outputs))


def warm(*names: str) -> list[Arrival]:
    """`names` warm up slowly; what they took must not count."""
    return [arrival(-100.0 + step, dict.fromkeys(names, 1)) for step in range(WARM_UP_STEPS)]


def test_time_between_arrivals():
    steps = [arrival(10 + 0.25 * step, {"a": 1, "b": 1}) for step in range(5)]
    assert step_seconds([*warm("a", "b"), *steps], 2) == pytest.approx(0.25)


def test_two_steps_in_one_arrival_are_two():
    steps = [arrival(10 + 0.5 * step, {"a": 2, "b": 2}) for step in range(5)]
    assert step_seconds([*warm("a", "b"), *steps], 2) == pytest.approx(0.25)


def test_a_late_starter_delays_the_clock_and_the_first_end_stops_it():
    arrivals = [*warm("a"), *warm("b"), arrival(10, {"a": 1, "b": 1}), arrival(11, {"a": 1, "b": 1})]
    arrivals += [arrival(20, {"a": 1}, finish=True), arrival(30, {"b": 1})]
    assert step_seconds(arrivals, 2) == pytest.approx(1)


def test_sequences_that_never_met_have_no_step():
    with pytest.raises(BenchError, match="--steps"):
        step_seconds([*warm("a"), arrival(1, {"a": 1}), arrival(2, {"b": 1})], 2)


def test_steps_after_the_warm_up():
    arrivals = [arrival(1, {"a": 1, "b": 1}), arrival(2, {"a": 2, "b": 1}), arrival(3, {"a": 1, "b": 2})]
    assert Generation(arrivals, 0, {}, 0.0).steps_after_warm(2) == 3


def test_no_two_prompts_alike():
    requests = Requests(EngineConfig()).make(8, 5) + Requests(EngineConfig()).make(1, 5)
    assert len({tuple(new.prompt_token_ids) for new in requests[:8]}) == 8
    assert all(new.sampling.stop_token_ids == [] for new in requests)


@pytest.mark.parametrize(("flags", "remedy"), [(["-tp", "2"], "leave out -tp"), (["--max-num-seqs", "8"], "or more")])
def test_flags_that_do_not_fit(flags: list[str], remedy: str):
    with pytest.raises(ConfigError, match=remedy):
        engine_config(flags, 64)
