"""Rendezvous hashing with bounded load, alone and over 100 simulated hosts."""

from collections import Counter

import pytest

from mini_engine.cluster.routing import LOAD_MARGIN, preference, ranked
from tests.cluster import simulation
from tests.cluster.simulation import names, simulate

KEYS = [f"key {number}" for number in range(3000)]


@pytest.fixture
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than the page shows, which take twelve seconds."""
    for name, number in {"VIDEOS": 2000, "REQUESTS": 6000, "WARM": 1500}.items():
        monkeypatch.setattr(simulation, name, number)


def test_keys_are_spread_evenly() -> None:
    counts = Counter(preference(key, names(3))[0] for key in KEYS)
    assert all(900 < count < 1100 for count in counts.values())


def test_only_keys_of_a_lost_host_move_and_they_move_to_their_next() -> None:
    for key in KEYS:
        first, *rest = preference(key, names(4))
        left = [host for host in names(4) if host != "host-2"]
        assert preference(key, left)[0] == (rest[0] if first == "host-2" else first)


def test_a_host_above_the_bound_is_skipped_and_one_to_avoid_comes_last() -> None:
    first, second, third = preference("key", names(3))
    assert ranked("key", {first: LOAD_MARGIN - 1, second: 0, third: 0}) == [first, second, third]
    assert ranked("key", {first: 2 * LOAD_MARGIN, second: 0, third: 0}) == [second, third, first]
    loads = {first: 0, second: 2 * LOAD_MARGIN, third: 0}
    assert ranked("key", loads, avoided={first}) == [third, second, first]


def test_routing_by_media_decodes_less_and_the_bound_evens_the_load(fewer: None) -> None:
    default, unbounded, bounded = map(simulate, ("power of two", "rendezvous", "rendezvous, bounded load"))
    assert bounded.decodes < 1.25 * bounded.least_decodes < default.decodes / 2
    assert bounded.imbalance < 2.5 < unbounded.imbalance
