"""What the parts of a step cost in seconds, learned from the steps that have run. Knows nothing of requests."""

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable

NUM_SAMPLES = 15  # recent steps that count for each estimate
QUICK_DECODES = 6  # the prompts of a quick step cost at most so many decode steps


class StepTimes:
    """A step takes `decode`, and `token` for each token of prompts, and `media` for each media token, in seconds.

    Each is a median of recent steps, so that a single step that was held up does not count. Until steps of a kind have
    run, it is a guess, by which 128 tokens of prompts, or 64 media tokens, are quick.

    Args:
        limit: see `--max-step-seconds`; 0: none.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.clock = time.monotonic
        self.decode, self.token, self.media = 0.128 / QUICK_DECODES, 0.001, 0.002
        self._decodes, self._prefills, self._encodes = (deque[tuple[float, int]](maxlen=NUM_SAMPLES) for _ in range(3))

    @property
    def quick(self) -> float:
        """Seconds that the prompts and media of a quick step take at most."""
        return QUICK_DECODES * self.decode

    @property
    def beside_decodes(self) -> float:
        """Seconds for prompts and media in a step that decodes: what the decodes leave of the limit, or half of the
        step if that is more, since they alone may take longer than the limit."""
        return max(self.limit - self.decode, self.decode) if self.limit else math.inf

    def record(self, seconds: float, num_prefill: int, num_encoded: int) -> None:
        """A step with so many tokens of prompts, and so many media tokens, took `seconds`."""
        if num_encoded:
            self._encodes.append((seconds - num_prefill * self.token, num_encoded))
            self.media = self._rate(self._encodes)
        elif num_prefill:
            self._prefills.append((seconds, num_prefill))
            self.token = self._rate(self._prefills)
        else:
            self._decodes.append((seconds, 1))
            self.decode = statistics.median(seconds for seconds, _ in self._decodes)

    def _rate(self, samples: Iterable[tuple[float, int]]) -> float:
        """Seconds for each of some tokens, beside a decode step: the median, weighted by their number."""
        rates = sorted(((seconds - self.decode) / count, count) for seconds, count in samples)
        half = sum(count for _, count in rates) / 2
        before = itertools.accumulate(count for _, count in rates)
        median = next(rate for (rate, _), total in zip(rates, before, strict=True) if total >= half)
        return max(median, 1e-9)
