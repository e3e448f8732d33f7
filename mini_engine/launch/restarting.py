"""How often engines may be restarted, and after which pause. Knows nothing of processes."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE_SECONDS = 1.0  # doubled each time
LONGEST_PAUSE_SECONDS = 60.0
HEALTHY_SECONDS = 600.0  # engines that have served for so long reset the count


class Restarts:
    """At most `most` in a row."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        self.most = most
        self.in_a_row = 0
        self._clock = clock
        self._serving_since: float | None = None

    def serving(self) -> None:
        """The engines serve from now on."""
        self._serving_since = self._clock()

    def next_pause(self) -> float | None:
        """They have died, or did not get so far: seconds to wait before the next start; None: there is to be none."""
        since, self._serving_since = self._serving_since, None
        if since is not None and self._clock() - since >= HEALTHY_SECONDS:
            self.in_a_row = 0
        if self.in_a_row >= self.most:
            return None
        self.in_a_row += 1
        return min(FIRST_PAUSE_SECONDS * 2 ** (self.in_a_row - 1), LONGEST_PAUSE_SECONDS)
