"""What a response says of the prompt: its text (`echo`), and the log probabilities of its tokens.

In pieces, as an answer, since a prompt may have tens of thousands of tokens. Knows nothing of HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_engine.messages import NewRequest, TokenLogprob
from mini_engine.prompt.detokenizer import LEAST_LOGPROB, Detokenizer, ListedToken, Vocabulary
from mini_engine.protocol.bodies import GenerationRequest

PIECE_ENTRIES = 512  # of the prompt's tokens and the likeliest at their places: some milliseconds

LogprobTables = list[dict[int, dict[str, Any]] | None]
"""vLLM's: of each token itself and the likeliest at its place, by id. None for the first, which follows nothing."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """What some tokens of an echoed prompt add to a choice."""

    text: str
    listed: list[ListedToken]  # with `logprobs`


class PromptEcho:
    """Of one request, for all of its choices. `add` gets what the engine says of the prompt, before any choice has a
    token."""

    def __init__(self, body: GenerationRequest, request: NewRequest, vocabulary: Vocabulary):
        self._token_ids, self._vocabulary = request.prompt_token_ids, vocabulary
        self._listed, self._count = body.num_logprobs if body.echo else None, body.prompt_logprobs
        self._width = 1 + (request.sampling.prompt_logprobs or 0)
        self._rows = bytearray()  # see `RequestOutput.prompt_logprobs`

    def __len__(self) -> int:
        """Tokens."""
        return len(self._token_ids)

    @property
    def piece_tokens(self) -> int:
        """Tokens for one `take`."""
        return max(1, PIECE_ENTRIES // self._width)

    def add(self, rows: bytes) -> None:
        self._rows += rows

    def take(self, start: int, detokenizer: Detokenizer) -> PromptPiece:
        """The next `piece_tokens` from token `start` on, echoed by a choice with this detokenizer."""
        stop = min(start + self.piece_tokens, len(self))
        texts, listed = list[str](), list[ListedToken]()
        places = self._read(start, stop)[1] if self._listed is not None else []
        for index in range(start, stop):
            if self._listed is not None:
                listed.append(detokenizer.list_token(places[index - start][: 1 + self._listed]))
            texts.append(detokenizer.push(self._token_ids[index], in_prompt=True))
        return PromptPiece("".join(texts), listed)

    def tables(self) -> Iterator[LogprobTables]:
        """The field `prompt_logprobs` in pieces, once the engine has said all; none where it was not requested. They
        are as JSON ten times as large as what is kept, and the same for each choice."""
        if self._count is None:
            return
        for start in range(0, len(self), self.piece_tokens):
            ranks, places = self._read(start, min(start + self.piece_tokens, len(self)))
            yield [self._table(rank, likely[: 1 + self._count]) for rank, likely in zip(ranks, places, strict=True)]

    def _read(self, start: int, stop: int) -> tuple[list[int], list[list[TokenLogprob]]]:
        """The ranks of tokens `start .. stop`, if requested, and each with the likeliest at its place."""
        size = 1 + 2 * self._width
        numbers = self._rows[4 * size * max(0, start - 1) : 4 * size * (stop - 1)]
        rows = np.frombuffer(numbers, "<i4").reshape(-1, size)
        ids, logprobs = rows[:, 1 : 1 + self._width].tolist(), rows[:, 1 + self._width :].view("<f4").tolist()
        first = [[TokenLogprob(self._token_ids[0], None)]] * (not start)
        return [0] * len(first) + rows[:, 0].tolist(), first + [
            [*map(TokenLogprob, *each)] for each in zip(ids, logprobs, strict=True)
        ]

    def _table(self, rank: int, likely: list[TokenLogprob]) -> dict[int, dict[str, Any]] | None:
        """`rank` is that of the first; the others come in the order of theirs."""
        if likely[0].logprob is None:
            return None
        return {
            token.token_id: {
                "logprob": max(token.logprob or 0.0, LEAST_LOGPROB),
                "rank": number or rank,
                "decoded_token": self._vocabulary.bytes_of(token.token_id).decode(errors="replace"),
            }
            for number, token in enumerate(likely)
        }
