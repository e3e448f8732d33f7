"""Pieces of answers whose tokens arrive faster than they are used."""

import asyncio
from typing import Any

import pytest

from mini_engine.prompt import answer
from mini_engine.prompt.answer import pieces


async def test_requests_with_many_pieces_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of one request in each iteration of the event loop."""

    class Waiting:
        """An answer of which all nine pieces wait: their numbers."""

        has_piece, over, taken = True, False, 0

        def take(self) -> int:
            self.taken += 1
            self.over = self.taken == 9
            return self.taken

    monkeypatch.setattr(answer, "TURN_SECONDS", -1)
    iterations, taken = 0, list[tuple[int, int]]()

    async def iterate() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    async def take(number: int) -> None:
        answers: Any = [Waiting(), Waiting()]
        async for _ in pieces(answers):
            taken.append((iterations, number))

    other = asyncio.create_task(iterate())
    await asyncio.gather(*map(take, range(3)))
    other.cancel()
    assert len({iteration for iteration, _ in taken}) == len(taken)
    assert [number for _, number in taken] == [0, 1, 2] * 2 * 9
