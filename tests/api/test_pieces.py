"""Pieces of answers whose tokens arrive faster than they are used."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from mini_engine.api import pieces as module
from mini_engine.api.detokenizer import Vocabulary
from mini_engine.api.generation import PIECE_OUTPUTS, Generation, Piece
from mini_engine.api.pieces import pieces
from mini_engine.api.protocol import CompletionRequest
from mini_engine.api.timings import RequestClock
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import NewRequest, RequestOutput, SamplingParams, Sibling


@pytest.fixture
def waiting(processor: MediaProcessor) -> Any:
    """Makes a request whose two samples have an output for each token of a text."""
    tokenizer = processor.hf_processor.tokenizer

    def make(text: str, first_index: int = 0) -> Generation:
        request = NewRequest("r", [1], SamplingParams(99, 1), siblings=[Sibling("r-1", 2)])
        asked, vocabulary = CompletionRequest(prompt=""), Vocabulary(tokenizer)
        made = Generation(asked, request, vocabulary, RequestClock(), first_index=first_index)
        for token in tokenizer.encode(text, add_special_tokens=False):
            for request_id in made.samples:
                made.receive(RequestOutput(request_id, [token]))
        for request_id in made.samples:
            made.receive(RequestOutput(request_id, [], "length"))
        return made

    return make


async def test_requests_with_many_pieces_take_turns(waiting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of one request in each iteration of the event loop."""
    monkeypatch.setattr(module, "TURN_SECONDS", -1)
    text, iterations, taken = "\n" * 100, 0, list[tuple[int, int, Piece]]()

    async def iterate() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    async def take(number: int) -> None:
        async for piece in pieces([waiting(text), waiting(text, 2)]):
            taken.append((iterations, number, piece))

    other = asyncio.create_task(iterate())
    await asyncio.gather(*map(take, range(3)))
    other.cancel()
    assert len({iteration for iteration, _, _ in taken}) == len(taken)
    assert [number for _, number, _ in taken] == [0, 1, 2] * (len(taken) // 3)
    assert max(piece.num_tokens for _, _, piece in taken) == PIECE_OUTPUTS
    for choice in itertools.product(range(3), range(4)):
        assert "".join(piece.text for _, number, piece in taken if (number, piece.index) == choice) == text
