"""Choosing the next token of each row of logits.

The parameters of a row act in this order, which is vLLM's:

1. the logarithms of the probabilities are noted, if asked for: they are the model's own
2. logit_bias is added
3. stop tokens are barred while there are fewer than min_tokens; after the bias, so that none can lift the bar
4. repetition_penalty, then frequency_penalty and presence_penalty
5. tokens outside of its grammar are masked, lower than barred ones: where only an end may come, it does
6. a greedy row takes its largest logit; for the others follow
7. temperature
8. min_p, then top_k, then top_p of the probability that these leave
9. one uniform number goes through the inverse of the distribution function, tokens in the order of their ids

Steps 2 to 4 are those of `penalties.py`, step 5 is that of `grammar.py`. Steps 7 to 9 are one kernel where Triton's
kernels run (`kernels/token_draw.py`); torch's operators here are the reference. A row's token depends on its logits,
its parameters, its tokens so far and the number of its output token, and on nothing else in the batch: noise is a pure
function of (seed, output index), so a seed gives the same tokens in any company, after a preemption, and on any number
of ranks. Knows nothing of sequences or steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.kernels import ops
from mini_engine.kernels.staging import HostCopy, to_device
from mini_engine.messages import SamplingParams, TokenLogprob

# How many of the likeliest tokens are looked at for top_p, before the whole vocabulary. Sorting a row of 152 k tokens
# takes 12 ms or more on a core; finding its largest 32 takes 0.2 ms, its largest 4096 1.3 ms.
WIDTHS = (32, 512, 4096)

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class RowSampling(NamedTuple):
    """The sampling parameters of a sequence, resolved once: `of` makes it."""

    params: SamplingParams
    greedy: bool
    adjusts: bool  # steps 2 to 4 may change something
    penalises: bool  # step 4 may, and so the tokens so far matter
    stream: int  # of noise

    @property
    def plain(self) -> bool:
        """Whether only the largest logit matters: greedy, without logprobs or a grammar."""
        return self.greedy and not self.adjusts and self.params.logprobs is None and not self.params.grammar

    @classmethod
    def of(cls, params: SamplingParams) -> RowSampling:
        # The single best token has no alternatives, whatever the temperature.
        greedy = params.temperature == 0 or params.top_k == 1
        penalises = bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
        adjusts = bool(params.logit_bias or params.min_tokens or penalises)
        return cls(params, greedy, adjusts, penalises, stream_of(params.seed))


class Sampled(NamedTuple):
    """`tokens`: int64 `[n]` on the logits' device. `logprobs` waits for the device, and gives those of the rows that
    report some: of the token itself, then of the likeliest."""

    tokens: Tensor
    logprobs: Callable[[], dict[int, list[TokenLogprob]]] = dict


def sample(
    logits: Tensor,
    rows: Sequence[RowSampling],
    output_indices: Sequence[int],
    process: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Sampled:
    """The next token of each row. Where Triton's kernels run it does not wait for the device, unless `process` does.

    Args:
        logits: `[n, vocab_size]` of any float dtype; may be changed.
        rows: n.
        output_indices: of each row the number of the output token to be chosen, from 0.
        process: steps 2 to 5 of all rows at once, in place or not.
    """
    reported = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not reported:
        return Sampled(_choose(process(logits), rows, output_indices))
    where = to_device(torch.tensor(reported), logits.device)
    raw = logits[where].float().log_softmax(dim=-1)
    tokens = _choose(process(logits), rows, output_indices)
    counts = [rows[i].params.logprobs or 0 for i in reported]
    return Sampled(tokens, _report(reported, raw, tokens[where], counts))


def _report(
    rows: Sequence[int], raw: Tensor, chosen: Tensor, counts: Sequence[int]
) -> Callable[[], dict[int, list[TokenLogprob]]]:
    """`Sampled.logprobs`, in transfer to the host.

    Args:
        rows: those of the batch that are reported; the arguments that follow are theirs.
        raw: logarithms `[rows, vocab_size]` of the probabilities; `chosen`: int64 `[rows]`, the tokens.
        counts: how many of the likeliest tokens each reports.
    """
    tokens, logprobs = HostCopy(chosen), HostCopy(raw.gather(1, chosen.unsqueeze(1))[:, 0])
    best: list[tuple[list[int], HostCopy, HostCopy]] = []
    # By count, and not the largest for all: the order of two equals may depend on how many are sought.
    for count in set(counts) - {0}:
        numbers = [i for i, limit in enumerate(counts) if limit == count]
        own = raw if len(numbers) == len(raw) else raw[to_device(torch.tensor(numbers), raw.device)]
        values, ids = own.topk(min(count, raw.shape[1]), dim=-1)
        best.append((numbers, HostCopy(ids), HostCopy(values)))

    def wait() -> dict[int, list[TokenLogprob]]:
        reports = [[TokenLogprob(*pair)] for pair in zip(tokens.values(), logprobs.values(), strict=True)]
        for numbers, ids, values in best:
            for i, row_ids, row_values in zip(numbers, ids.values(), values.values(), strict=True):
                reports[i] += map(TokenLogprob, row_ids, row_values)
        return dict(zip(rows, reports, strict=True))

    return wait


def stream_of(seed: int) -> int:
    """The stream of noise of a seed, which is mixed so that the streams of neighbouring seeds do not overlap."""
    return _mix(seed & _MASK64)


def noise(stream: int, index: int) -> float:
    """The `index`-th number in [0, 1) of a stream, by SplitMix64 (Steele, Lea and Flood 2014). 52 bits: with 53, the
    product with a sum of probabilities could round up to the sum."""
    return (_mix(stream + (index + 1) * _GOLDEN) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _choose(logits: Tensor, rows: Sequence[RowSampling], output_indices: Sequence[int]) -> Tensor:
    noisy = [i for i, row in enumerate(rows) if not row.greedy]
    if not noisy:
        return largest(logits)
    params = [rows[i].params for i in noisy]
    numbers = [noise(rows[i].stream, output_indices[i]) for i in noisy]
    if len(noisy) == len(rows):
        return _draw(logits, params, numbers)
    tokens = largest(logits)
    where = to_device(torch.tensor(noisy), logits.device)
    tokens[where] = _draw(logits[where], params, numbers)
    return tokens


def largest(logits: Tensor) -> Tensor:
    """int64 `[n]`, the first of equals: what `sample` gives where every row is plain."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # An eighth of the time that torch takes: 2 us instead of 16 for 32 rows of 768.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    """Steps 7 to 9, for rows that are not greedy; `numbers` are uniform in [0, 1)."""
    temperature = to_device(torch.tensor([p.temperature for p in params]), logits.device)
    if ops.fused(logits):
        filters = [(p.min_p, p.top_k, p.top_p, number) for p, number in zip(params, numbers, strict=True)]
        parameters = to_device(torch.tensor(filters, dtype=torch.float64), logits.device)
        return ops.kernels("token_draw").draw(logits, temperature, parameters)
    scores = logits.float() / temperature.unsqueeze(1)
    keep_min_p(scores, [p.min_p for p in params])
    keep_top_k(scores, [p.top_k for p in params])
    probabilities = scores.softmax(dim=-1)
    keep_top_p(probabilities, [p.top_p for p in params])
    # float64: over a large vocabulary the rounding of a float32 sum exceeds the smaller probabilities.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    drawn = to_device(torch.tensor(numbers, dtype=torch.float64), logits.device)
    thresholds = cumulative[:, -1:] * drawn.unsqueeze(1)
    # The first token whose sum exceeds the threshold has a probability above zero. Logits that are not finite make no
    # sums at all: such a row gets the last token, and the others theirs.
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


def keep_min_p(scores: Tensor, min_p: Sequence[float]) -> None:
    """Set to -inf, in place, the tokens less likely than min_p times the likeliest (Nguyen et al. 2024); 0 keeps all.
    `scores` `[n, vocab_size]` are logits after the temperature: a ratio of probabilities is a difference of these."""
    if any(min_p):
        ratios = [math.log(p) if p > 0 else -math.inf for p in min_p]
        bound = scores.amax(dim=-1, keepdim=True) + to_device(torch.tensor(ratios), scores.device).unsqueeze(1)
        scores.masked_fill_(scores < bound, float("-inf"))


def keep_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """Set all but the k largest of a row to -inf, in place; ties with the k-th stay, 0 keeps all."""
    limited = [i for i, k in enumerate(top_k) if 0 < k < scores.shape[1]]
    if not limited:
        return
    where = to_device(torch.tensor(limited), scores.device)
    last = to_device(torch.tensor([top_k[i] - 1 for i in limited]), scores.device).unsqueeze(1)
    chosen = scores[where]
    smallest = chosen.topk(max(top_k[i] for i in limited), dim=-1).values.gather(1, last)
    scores[where] = chosen.masked_fill_(chosen < smallest, float("-inf"))


def keep_top_p(probabilities: Tensor, top_p: Sequence[float]) -> None:
    """Set to 0, in place, the tokens outside a row's smallest set whose sum reaches p (nucleus sampling, Holtzman et
    al. 2020). Among equal probabilities the smaller id goes first; the largest always stays.

    Waits for the device, to find out how many of the likeliest are enough.
    """
    size = probabilities.shape[1]
    left = [i for i, p in enumerate(top_p) if p < 1.0]
    for width in (*(width for width in WIDTHS if width < size), size):
        if left:
            reached = _keep_reached(probabilities, left, [top_p[i] for i in left], width)
            left = [row for row, is_enough in zip(left, reached.tolist(), strict=True) if not is_enough]


def _keep_reached(probabilities: Tensor, rows: Sequence[int], top_p: Sequence[float], width: int) -> Tensor:
    """Apply top_p to those of `rows` whose `width` likeliest reach it; returns which did.

    Which width a row needs has no influence on its result.
    """
    device = probabilities.device
    where = to_device(torch.tensor(rows), device)
    bound = to_device(torch.tensor(top_p, dtype=torch.float64), device).unsqueeze(1)
    chosen = probabilities[where]
    whole = width == probabilities.shape[1]
    values = (chosen.sort(dim=-1, descending=True) if whole else chosen.topk(width, dim=-1)).values
    sums = values.cumsum(dim=-1, dtype=torch.float64)
    # All tokens are enough even where rounding leaves their sum below p.
    reached = (sums[:, -1] >= bound[:, 0]) | whole
    # A token is outside when those before it already reach p; the first has none before it.
    count = (sums[:, :-1] < bound).sum(dim=-1, keepdim=True) + 1
    last = values.gather(1, count - 1)
    outside = chosen < last
    # Of the tokens that are as likely as the last one inside, as many stay as there is room for.
    ties, room = chosen == last, count - (values > last).sum(dim=-1, keepdim=True)
    if bool((ties.sum(dim=-1, keepdim=True) > room).any()):
        outside |= ties & (ties.cumsum(dim=-1) > room)
    probabilities[where] = chosen.masked_fill_(outside & reached.unsqueeze(1), 0)
    return reached
