"""The pieces of a request's choices, in a loop that leaves the event loop to others.

One request may have thousands of tokens to detokenise, search and encode at once. Knows nothing of responses.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence

from mini_engine.prompt.answer import Answer, Piece

TURN_SECONDS = 0.002  # that one request may take and use its pieces before it yields to the event loop


async def pieces(answers: Sequence[Answer]) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices; tokens that arrive faster than pieces are taken make one piece. A caller that is slow,
    or takes many, does not block the event loop. Raises as `Answer.take`."""
    arrived = asyncio.Event()
    for answer in answers:
        answer.arrived = arrived
    resumed = time.monotonic()
    while unfinished := [answer for answer in answers if not answer.over]:
        arrived.clear()
        for answer in unfinished:
            if answer.is_waiting:
                if time.monotonic() - resumed > TURN_SECONDS:
                    async with _turns(asyncio.get_running_loop()):
                        await asyncio.sleep(0)
                    resumed = time.monotonic()
                yield answer.take()
                arrived.set()  # there may be more
        if not arrived.is_set():
            await arrived.wait()
            resumed = time.monotonic()


@functools.lru_cache(maxsize=1)
def _turns(_: asyncio.AbstractEventLoop) -> asyncio.Lock:
    """Of the requests that have used up a turn, one continues in each iteration of the loop, in order of arrival."""
    return asyncio.Lock()
