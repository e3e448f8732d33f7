"""The engine core runs without the cyclic garbage collector (`core/engine_core.py`): its objects form no cycles."""

import gc

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import test_properties, test_random_clients

SMALL = {"blocks": 20, "max_seqs": 4, "max_tokens": 12, "encoder_cache_tokens": 10}


@settings(max_examples=10)
@given(loads=st.lists(test_properties.loads, min_size=10, max_size=10), ranks=st.integers(1, 2), timing=st.integers())
def test_no_load_leaves_reference_cycles(loads, ranks, timing):
    gc.collect()
    gc.freeze()  # what the process had before, such as other tests' objects, does not count
    gc.disable()
    try:
        for kind in ("lru", "shm"):
            test_random_clients.play(kind, 4, timing, {"async_scheduling": ranks == 1})
        test_properties.play(loads, SMALL | {"ranks": ranks}, timing)
        assert gc.collect() == 0
    finally:
        gc.enable()
