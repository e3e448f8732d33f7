"""When requests are sent: the arrival process of `--request-rate` and `--burstiness`."""

from __future__ import annotations

import itertools
import math
import random


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start at which each of `count` requests is sent, ascending.

    The times between them are drawn from a gamma distribution with the mean 1 / `rate` and the shape `burstiness`, as
    vLLM's client means it: 1 is a Poisson process, less comes in bursts, more is more even. An infinite rate sends all
    at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    return list(itertools.accumulate(rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)))
