"""The engine core runs without the cyclic garbage collector (`core/engine_core.py`): its objects form no cycles."""

import functools
import gc
from collections.abc import Callable


def leaves_no_cycles(test: Callable[..., None]) -> Callable[..., None]:
    """Fails also if the objects of `test` form cycles."""

    @functools.wraps(test)
    def checked(*args, **more):
        gc.collect()
        gc.freeze()  # what the process had before, such as other tests' objects, does not count
        gc.disable()
        try:
            test(*args, **more)
            assert gc.collect() == 0
        finally:
            gc.enable()

    return checked
