"""The engine core runs without the cyclic garbage collector (`core/engine_core.py`): its objects form no cycles."""

from __future__ import annotations

import gc
import random

from tests.core import test_properties, test_random_clients


def requests_of_every_kind(chance: random.Random) -> list[test_properties.Asked]:
    return [
        test_properties.Asked(
            prompt=chance.randint(1, 30),
            output=chance.randint(1, 12),
            arrival=chance.randint(0, 20),
            media=[chance.randint(0, 3) for _ in range(chance.randint(0, 2))],
            priority=chance.randint(0, 1),
            siblings=chance.randint(0, 2),
            abort=chance.choice([None, 5, 15]),
            stops=chance.random() < 0.5,
        )
        for _ in range(10)
    ]


def test_no_load_leaves_reference_cycles():
    settings = {"blocks": 20, "max_seqs": 4, "max_tokens": 12, "encoder_cache_tokens": 10}
    gc.collect()
    gc.disable()
    try:
        worlds = []
        for seed in range(10):
            worlds += [test_random_clients.play(kind, 4, seed, bool(seed % 2)) for kind in ("lru", "shm")]
            requests = requests_of_every_kind(random.Random(seed))
            worlds.append(test_properties.play(requests, settings | {"ranks": 1 + seed % 2}, seed))
        assert gc.collect() == 0
    finally:
        gc.enable()
