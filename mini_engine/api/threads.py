"""Thread pools whose threads all start with them: later, the host may not give any more."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

START_SECONDS = 60.0


def start_thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool of `threads` running threads. ThreadPoolExecutor alone starts them on demand; where it cannot, it raises
    RuntimeError and keeps the work, which would run when its memory is used by others.

    Raises:
        RuntimeError: a thread cannot be started.
    """
    pool = ThreadPoolExecutor(threads, name)
    barrier = threading.Barrier(threads)
    try:
        for started in [pool.submit(barrier.wait, START_SECONDS) for _ in range(threads)]:
            started.result()
    except RuntimeError:
        barrier.abort()
        raise
    return pool
