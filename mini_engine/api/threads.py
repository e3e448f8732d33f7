"""Threads for what would hold up the event loop, on a host that may give no more of them at any time.

Knows nothing of what they do.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor


class Threads(ThreadPoolExecutor):
    """Up to `most` threads; where the host gives no further one, those that are there do the work in turn.

    The base class raises RuntimeError then, and leaves the work in its line: it would be done later, for nobody, and
    write into memory that belongs to others by then.

    Raises:
        RuntimeError: there is not even one.
    """

    def __init__(self, most: int, name: str):
        super().__init__(most, thread_name_prefix=name)
        self.submit(int)

    def _adjust_thread_count(self) -> None:
        with contextlib.suppress(RuntimeError) if self._threads else contextlib.nullcontext():
            super()._adjust_thread_count()
