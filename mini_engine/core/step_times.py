"""What the parts of a step cost in seconds, learned from the steps that have run. Knows nothing of requests."""

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable

NUM_SAMPLES = 15  # recent steps that count for each estimate
WITHOUT_DECODES, ALONE = 4, 10  # times as long as beside decodes a step may take
QUICK_DECODES = 6  # the prompts of a quick step cost at most so many decode steps

Measurement = tuple[float, int, float]  # seconds, tokens of prompts, media tokens


class StepTimes:
    """In seconds: a step takes `decode_step`, and `per_token` more for each token of prompts, and `per_media_token` for
    each media token.

    Each is a median of recent steps, so that a single step that was held up does not count. Until steps of a kind have
    run, it is a guess, by which 128 tokens of prompts, or 64 media tokens, are quick: high, since the first step could
    take minutes on a slow CPU.

    Args:
        limit: see `--max-step-seconds`; 0: none.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.clock = time.monotonic
        self.decode_step, self.per_token, self.per_media_token = 2.048 / QUICK_DECODES, 0.016, 0.032
        # By what the step is a sample of.
        self._decodes = deque[float](maxlen=NUM_SAMPLES)
        self._prefills, self._encodes = (deque[Measurement](maxlen=NUM_SAMPLES) for _ in range(2))

    @property
    def quick_step(self) -> float:
        """Seconds that the prompts and media of a quick step take at most."""
        return QUICK_DECODES * self.decode_step

    def for_prompts(self, beside_decodes: bool, is_alone: bool) -> float:
        """Seconds for prompts and media in a step: the limit, or those of a decode step if that is more, since with
        less most of the time would go into reading weights. Without decodes only requests that are still to come may
        wait for the step; few of them do where a single request is there."""
        if not self.limit:
            return math.inf
        return max(self.limit, self.decode_step) * (1 if beside_decodes else ALONE if is_alone else WITHOUT_DECODES)

    def record(self, seconds: float, num_prefill: int, num_encoded: float) -> None:
        """A step with so many tokens of prompts, and so many media tokens, took `seconds`."""
        if not (num_prefill or num_encoded):  # most steps: the others' estimates are left as they are
            self._decodes.append(seconds)
            self.decode_step = statistics.median(self._decodes)
            return
        (self._encodes if num_encoded else self._prefills).append((seconds, num_prefill, num_encoded))
        # Where no step had prompts alone, as if each request has an image, tokens of both kinds count alike.
        if samples := self._prefills or [sample for sample in self._encodes if sample[1]]:
            self.per_token = self._rate((seconds, length + count) for seconds, length, count in samples)
        if self._encodes:
            self.per_media_token = self._rate(
                (seconds - length * self.per_token, count) for seconds, length, count in self._encodes
            )

    def _rate(self, samples: Iterable[tuple[float, float]]) -> float:
        """Seconds for each of some tokens, beside a decode step: the median, weighted by their number. Few tokens may
        take no time beside reading the weights, so tokens count as half a decode step at least: otherwise short prompts
        would make a long one appear to cost nothing."""
        least = self.decode_step / 2
        rates = sorted((max(seconds - self.decode_step, least) / count, count) for seconds, count in samples)
        half = sum(count for _, count in rates) / 2
        before = itertools.accumulate(count for _, count in rates)
        median = next(rate for (rate, _), total in zip(rates, before, strict=True) if total >= half)
        return max(median, 1e-9)
