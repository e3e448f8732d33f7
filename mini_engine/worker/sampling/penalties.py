"""Changes to a row's logits before temperature, for greedy rows as well: logit bias, masked stop tokens, penalties.
`sampler.py` gives their order and its reason.

What the penalties need to know of a sequence's tokens is counted on the device, where the tokens are chosen: so a step
can be launched before the host knows the token of the step before.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from mini_engine.kernels import ops
from mini_engine.kernels.staging import to_device
from mini_engine.worker.batch import SequenceState

BARRED = -1e30  # not infinity: where a grammar masks all but stop tokens, one of them is chosen all the same
IN_PROMPT, IN_OUTPUT = 1, 2  # what an occurrence adds to a count: see `ops.penalise`


class LogitsProcessors:
    """Steps 2 to 4 of `sampler.py` for all rows of a batch, for as many steps as the same sequences decode.

    Takes `4 * vocab_size` bytes of the device for each sequence that is penalised for its tokens: 39 MB for 64
    sequences and 152 k tokens.

    Args:
        sequences: of the rows; the host knows their tokens before `stops`, the indices of those to be chosen.
    """

    def __init__(
        self, sequences: Sequence[SequenceState], stops: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self._size, self._device = vocab_size, device
        self._params = [sequence.sampling.params for sequence in sequences]
        self._steps = 0  # whose tokens have been counted
        # Output tokens that a sequence has still to choose before it may stop.
        self._short = [
            params.min_tokens - (stop - sequence.prompt_length) if params.stop_token_ids else 0
            for params, sequence, stop in zip(self._params, sequences, stops, strict=True)
        ]
        self._mask_stop_tokens()
        # As arrays: a list of all takes several times as long, at each change of the batch.
        biases = [(i * vocab_size, p.logit_bias) for i, p in enumerate(self._params) if p.logit_bias]
        indices = [begin + np.fromiter(bias, np.int64) for begin, bias in biases]
        values = [np.fromiter(bias.values(), np.float32) for _, bias in biases]
        self._biased = self._joined(np.int64, indices)
        self._biases = self._joined(np.float32, values)

        penalised = [i for i, sequence in enumerate(sequences) if sequence.sampling.penalises]
        rows = {i: row for row, i in enumerate(penalised)}  # of the counts
        self._penalised = self._integers(penalised)
        self._starts = self._integers(row * vocab_size for row in rows.values())
        self._rows = self._integers(rows.get(i, -1) for i in range(len(sequences)))
        factors = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in self._params]
        self._factors = to_device(torch.tensor(factors), device)
        self._counts = torch.zeros(len(rows), vocab_size, dtype=torch.int32, device=device)
        self._once = torch.full((), IN_OUTPUT, dtype=torch.int32, device=device)
        prompts, outputs = list[np.ndarray](), list[np.ndarray]()
        for i, row in rows.items():
            tokens, length = sequences[i].tokens[: stops[i]] + row * vocab_size, sequences[i].prompt_length
            prompts.append(tokens[:length])
            outputs.append(tokens[length:])
        self._counts.view(-1).index_fill_(0, self._joined(np.int64, prompts), IN_PROMPT)
        self._add(self._joined(np.int64, outputs))

    def apply(self, logits: Tensor) -> Tensor:
        """`[n, vocab_size]`, as they are or changed in place, or a float32 copy, changed."""
        if self._steps == self._bar_ends:
            self._mask_stop_tokens()
        if not (len(self._biased) or len(self._barred) or len(self._penalised)):
            return logits
        scores = logits.float()
        if len(self._biased):
            scores.view(-1).index_add_(0, self._biased, self._biases)
        if len(self._barred):
            scores.view(-1).index_fill_(0, self._barred, BARRED)
        if len(self._penalised):
            ops.penalise(scores, self._counts, self._rows, self._factors)
        return scores

    def count(self, tokens: Tensor) -> None:
        """Count what was chosen, int64 `[n]` on the device, for the next step."""
        self._steps += 1
        if len(self._penalised):
            self._add(self._starts + tokens.index_select(0, self._penalised))

    def _add(self, indices: Tensor) -> None:
        self._counts.view(-1).index_add_(0, indices, self._once.expand(len(indices)))

    def _mask_stop_tokens(self) -> None:
        """Set which are barred from this step on, and the step at which that changes."""
        barred = [i for i, short in enumerate(self._short) if short > self._steps]
        self._bar_ends = min((self._short[i] for i in barred), default=None)
        self._barred = self._integers(
            i * self._size + token for i in barred for token in self._params[i].stop_token_ids
        )

    def _integers(self, values: Iterable[int]) -> Tensor:
        return to_device(torch.tensor(list(values), dtype=torch.int64), self._device)

    def _joined(self, dtype: type[np.generic], parts: Sequence[np.ndarray]) -> Tensor:
        return to_device(torch.from_numpy(np.concatenate([np.empty(0, dtype), *parts])), self._device)
