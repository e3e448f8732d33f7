"""Steps 2 to 4 of `sampler.py` for all rows of a batch at once, without a wait for the device.

What the penalties want to know of a sequence's tokens is counted on the device, where the tokens are chosen: so a step
can be launched before the host knows the token of the step before. `penalties.py` does the same row by row, from the
tokens themselves; it is the reference, and takes less on a CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from mini_engine.kernels import ops
from mini_engine.worker.batch import FlatBatch
from mini_engine.worker.sequences import SequenceState
from mini_engine.worker.staging import all_to_device, to_device

ROWS_AT_ONCE = 16  # by which the memory for counts grows

IN_PROMPT, IN_OUTPUT = 1, 2  # what an occurrence adds to a count: see `ops.penalise`


class TokenCounts:
    """How often each token stands in the sequences that are penalised for it: for each a row of int32 `[vocab_size]`.

    A row is made of a sequence's tokens when it first samples, and made anew when it samples at another place than next
    to its last token, as after a restart; each step then adds what it chose.

    Takes `4 * vocab_size` bytes for each of the most such sequences that ever sampled in one step, in groups of
    `ROWS_AT_ONCE`: 39 MB for 64 sequences and 152 k tokens; nothing before the first. A sequence that is not in the
    step may lose its row to one that is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._once = torch.full((), IN_OUTPUT, dtype=torch.int32, device=device)
        self._free: list[int] = []
        # By sequence its row, and how many of its tokens are counted. Those that sampled last are last.
        self._held: dict[str, tuple[int, int]] = {}
        self._current: Adjustments | None = None

    @property
    def nbytes(self) -> int:
        """Of the device's memory."""
        return self._counts.nbytes

    def adjustments(self, batch: FlatBatch, vocab_size: int) -> Adjustments:
        """What this step's logits need. The host must know the sequences' tokens, unless `batch` is that of the last
        call, a step on: then nothing is made that is there already."""
        if self._current is None or self._current.batch is not batch or self._current.over:
            self._put_away()
            self._current = self._prepare(batch, vocab_size)
        return self._current

    def forget(self, finished: Collection[str]) -> None:
        """These sequences are over."""
        self._put_away()
        for request_id in finished:
            if request_id in self._held:
                self._free.append(self._held.pop(request_id)[0])

    def _put_away(self) -> None:
        """Note how far the last batch has been counted."""
        if self._current is None:
            return
        for sequence in self._current.counted:
            row, length = self._held[sequence.request_id]
            self._held[sequence.request_id] = row, length + self._current.steps
        self._current = None

    def _prepare(self, batch: FlatBatch, vocab_size: int) -> Adjustments:
        stops = batch.stops.tolist()
        where = [i for i, sequence in enumerate(batch.sampled) if sequence.recipe.penalises]
        if len(where) > len(self._counts):
            self._grow(len(where), vocab_size)
        rows = self._place([batch.sampled[i] for i in where], [stops[i] for i in where])
        return Adjustments(batch, stops, vocab_size, self._counts, self._once, dict(zip(where, rows, strict=True)))

    def _grow(self, needed: int, vocab_size: int) -> None:
        """Begin anew, with rows for all: old and new memory together would be more than was set aside."""
        rows = -(-needed // ROWS_AT_ONCE) * ROWS_AT_ONCE
        self._held.clear()
        self._counts = self._counts.new_empty(0, 0)
        self._counts = self._counts.new_empty(rows, vocab_size)
        self._free = list(range(rows))

    def _place(self, sequences: Sequence[SequenceState], stops: Sequence[int]) -> list[int]:
        """The rows of these sequences, in which all tokens before the stops are counted."""
        here = {sequence.request_id for sequence in sequences}
        rows = []
        for sequence, stop in zip(sequences, stops, strict=True):
            held = self._held.pop(sequence.request_id, None)
            row = held[0] if held is not None else self._free.pop() if self._free else self._take_from_others(here)
            if held is None or held[1] != stop:
                self._count(row, sequence.tokens.array[:stop], sequence.prompt_length)
            self._held[sequence.request_id] = row, stop
            rows.append(row)
        return rows

    def _take_from_others(self, here: Collection[str]) -> int:
        return self._held.pop(next(name for name in self._held if name not in here))[0]

    def _count(self, row: int, tokens: np.ndarray, prompt_length: int) -> None:
        ids, counts = to_device(torch.from_numpy(tokens), self._device), self._counts[row]
        counts.zero_()
        counts.index_fill_(0, ids[:prompt_length], IN_PROMPT)
        output = ids[prompt_length:]
        counts.index_add_(0, output, self._once.expand(len(output)))


class Adjustments:
    """What a batch's logits need, on the device; good for as many steps as the batch is carried on, unless `over`.

    Args:
        batch: its sequences; `stops`: where each stands; `size`: of the vocabulary.
        counts: see `ops.penalise`; `once`: int32 `[]`, what one more token adds.
        rows: which of `counts` is that of a row of the batch; those that are not there are not penalised.
    """

    def __init__(
        self, batch: FlatBatch, stops: Sequence[int], size: int, counts: Tensor, once: Tensor, rows: dict[int, int]
    ) -> None:
        self.batch = batch
        self.counted = [batch.sampled[i] for i in rows]
        self.steps = 0  # whose tokens have been counted
        self._counts, self._once = counts, once.expand(len(rows))
        params = [sequence.recipe.params for sequence in batch.sampled]
        biases = [(i * size + token, value) for i, p in enumerate(params) for token, value in p.logit_bias.items()]
        # Tokens that a sequence has still to sample before it may stop.
        short = [
            p.min_tokens - (stop - sequence.prompt_length) if p.stop_token_ids else 0
            for p, sequence, stop in zip(params, batch.sampled, stops, strict=True)
        ]
        self._end = min((count for count in short if count > 0), default=None)
        barred = [i * size + token for i, p in enumerate(params) if short[i] > 0 for token in p.stop_token_ids]
        factors = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        self._rows, self._where, self._starts, self._barred, self._biased, *floats = all_to_device(
            (
                np.array([rows.get(i, -1) for i in range(len(params))], dtype=np.int64),
                np.array(list(rows), dtype=np.int64),
                np.array([row * size for row in rows.values()], dtype=np.int64),
                np.array(barred, dtype=np.int64),
                np.array([at for at, _ in biases], dtype=np.int64),
                np.array([value for _, value in biases], dtype=np.float64),
                np.array(factors, dtype=np.float64),
            ),
            counts.device,
        )
        self._biases, self._factors = (values.float() for values in floats)

    @property
    def over(self) -> bool:
        """Whether a stop token is barred that need not be any longer."""
        return self._end == self.steps

    def apply(self, logits: Tensor) -> Tensor:
        """`[n, vocab_size]`, as they are or changed in place, or a float32 copy, changed."""
        if not (len(self._biased) or len(self._barred) or self.counted):
            return logits
        scores = logits.float()
        if len(self._biased):
            scores.view(-1).index_add_(0, self._biased, self._biases)
        if len(self._barred):
            scores.view(-1).index_fill_(0, self._barred, float("-inf"))
        if self.counted:
            ops.penalise(scores, self._counts, self._rows, self._factors)
        return scores

    def count(self, tokens: Tensor) -> None:
        """int64 `[n]` on the device, what was chosen: the next step may come."""
        self.steps += 1
        if self.counted:
            chosen = tokens if len(self.counted) == len(tokens) else tokens.index_select(0, self._where)
            self._counts.view(-1).index_add_(0, self._starts + chosen, self._once)
