"""The pieces of a request's choices, in a loop that leaves the event loop to others.

One request may have thousands of tokens to detokenise, search and encode at once. Knows nothing of what they become.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence

from mini_engine.prompt.answer import Generation, Piece

TURN_SECONDS = 0.002  # that the pieces of a request may be taken and used before others have the event loop


async def pieces(generations: Sequence[Generation]) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices; tokens that arrive faster than they are taken are one. A caller that is slow, or has
    many to take, does not hold the event loop. Raises as `Generation.take`."""
    arrived = asyncio.Event()
    for generation in generations:
        generation.arrived = arrived
    resumed = time.monotonic()
    while unfinished := [generation for generation in generations if not generation.over]:
        arrived.clear()
        for generation in unfinished:
            if generation.is_waiting:
                if time.monotonic() - resumed > TURN_SECONDS:
                    async with _turns(asyncio.get_running_loop()):
                        await asyncio.sleep(0)
                    resumed = time.monotonic()
                yield generation.take()
                arrived.set()  # there may be more
        if not arrived.is_set():
            await arrived.wait()
            resumed = time.monotonic()


@functools.lru_cache(maxsize=1)
def _turns(_: asyncio.AbstractEventLoop) -> asyncio.Lock:
    """Of those that have used up a turn, one goes on in each iteration of the loop, first come, first served."""
    return asyncio.Lock()
