"""What a response says of the prompt: its text (`echo`), and the log probabilities of its tokens.

In pieces, as an answer, since a prompt may have tens of thousands of tokens. Knows nothing of HTTP.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mini_engine.messages import NewRequest, TokenLogprob
from mini_engine.prompt.detokenizer import LEAST_LOGPROB, Detokenizer, ListedToken, Vocabulary
from mini_engine.protocol.bodies import GenerationRequest

PIECE_ENTRIES = 512  # of the prompt's tokens and the likeliest at their places: some milliseconds

LogprobTables = list[dict[int, dict[str, Any]] | None]
"""vLLM's: of each token itself and the likeliest at its place, by id. None for the first, which follows nothing."""


class PromptEcho:
    """Of one request, for all of its choices. `add` gets what the engine says of the prompt, before any choice has a
    token."""

    def __init__(self, body: GenerationRequest, request: NewRequest, vocabulary: Vocabulary):
        self._token_ids, self._vocabulary = request.prompt_token_ids, vocabulary
        self._listed, self._count = body.num_logprobs if body.echo else None, body.prompt_logprobs
        self._width = 1 + (request.sampling.prompt_logprobs or 0)
        self._rows = bytearray()  # see `RequestOutput.prompt_logprobs`

    def add(self, rows: bytes) -> None:
        self._rows += rows

    def pieces(self, detokenizer: Detokenizer) -> Iterator[tuple[str, list[ListedToken] | None]]:
        """The echo, for a choice with this detokenizer: text, and with `logprobs` its listed tokens. Taken when the
        choice has a token."""
        for start, stop in self._parts():
            texts, listed = list[str](), list[ListedToken]()
            places = self._read(start, stop)
            for index, token_id in enumerate(self._token_ids[start:stop]):
                if self._listed is not None:
                    listed.append(detokenizer.list_token(places[index][1][: 1 + self._listed]))
                texts.append(detokenizer.push(token_id, in_prompt=True))
            yield "".join(texts), listed or None

    def tables(self) -> Iterator[LogprobTables]:
        """The field `prompt_logprobs` in pieces, once the engine has said all; none where it was not requested. They
        are as JSON ten times as large as what is kept, and the same for each choice."""
        if self._count is not None:
            for start, stop in self._parts():
                yield [self._table(rank, likely[: 1 + self._count]) for rank, likely in self._read(start, stop)]

    def _parts(self) -> Iterator[tuple[int, int]]:
        """The first token of each piece, and the one after its last."""
        size = max(1, PIECE_ENTRIES // self._width)
        for start in range(0, len(self._token_ids), size):
            yield start, min(start + size, len(self._token_ids))

    def _read(self, start: int, stop: int) -> list[tuple[int, list[TokenLogprob]]]:
        """Of tokens `start .. stop`, if requested, the rank, and the token with the likeliest at its place."""
        size = 1 + 2 * self._width
        numbers = self._rows[4 * size * max(0, start - 1) : 4 * size * (stop - 1)]
        rows = np.frombuffer(numbers, "<i4").reshape(-1, size)
        parts = rows[:, 0], rows[:, 1 : 1 + self._width], rows[:, 1 + self._width :].view("<f4")
        places = zip(*(part.tolist() for part in parts), strict=True)
        first = [] if start else [(0, [TokenLogprob(self._token_ids[0], None)])]
        return first + [(rank, [*map(TokenLogprob, ids, logprobs)]) for rank, ids, logprobs in places]

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
