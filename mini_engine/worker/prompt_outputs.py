"""What a step returns of prompts: the numbers of requests with `PoolingParams`, and the log probabilities of a prompt's
own tokens. Knows nothing of steps.

Each is a collective, and returns a function that waits for the device and gives a field of `StepResult`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mini_engine.kernels.staging import HostCopy, to_device
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.batch import ChunkRows

SLICE_BYTES = 1 << 26  # of logits in float32 at a time: the rows of a long prompt would take gigabytes

Pending = Callable[[], dict[str, bytes]]
"""Bytes in transfer to the host, by request id."""


def pool_prompts(model: VisionLanguageModel, hidden: Tensor, parts: Sequence[ChunkRows]) -> Pending:
    """`StepResult.pooled`; without meaning on ranks but the first.

    Args:
        hidden: `[n, hidden_size]` of the whole step, after the last norm.
        parts: the chunks that end the prompts of these requests.
    """
    pooled = [(part, part.sequence.pooling.token_ids) for part in parts if part.sequence.pooling is not None]
    pooled.sort(key=lambda each: bool(each[1]))  # hidden states, then logits
    counts = {part.sequence.request_id: len(token_ids) or hidden.shape[1] for part, token_ids in pooled}
    states = torch.tensor([part.last_row for part, token_ids in pooled if not token_ids], dtype=torch.int64)
    numbers = hidden.index_select(0, to_device(states, hidden.device)).float().flatten()
    if scores := [(part.last_row, token) for part, token_ids in pooled for token in token_ids]:
        rows, tokens = to_device(torch.tensor(scores).T.contiguous(), hidden.device)
        numbers = torch.cat((numbers, model.logits_of(hidden, rows, tokens)))
    copy = HostCopy(numbers)

    def wait() -> dict[str, bytes]:
        split = copy.tensor().split([*counts.values()])
        return {name: own.numpy().tobytes() for name, own in zip(counts, split, strict=True)}

    return wait


def list_prompts(model: VisionLanguageModel, hidden: Tensor, parts: Sequence[ChunkRows]) -> Pending:
    """`StepResult.prompt_logprobs`; empty on ranks but the first. Arguments as of `pool_prompts`.

    A prompt is computed again after a preemption; each of its rows is listed once, and so counted in its sequence.
    """
    copies = defaultdict[str, list[HostCopy]](list)
    size = max(1, SLICE_BYTES // (4 * model.config.text.vocab_size))
    for part in parts:
        sequence, count = part.sequence, part.sequence.sampling.params.prompt_logprobs or 0
        stop = min(part.stop, sequence.prompt_length - 1)  # what the last token predicts is not in the prompt
        for start in range(max(part.chunk.start, sequence.num_listed), stop, size):
            sequence.num_listed = end = min(start + size, stop)
            row = part.first + start - part.chunk.start
            logits = model.logits(hidden[row : row + end - start])
            if logits is not None:
                following = to_device(torch.from_numpy(sequence.tokens[start + 1 : end + 1]), hidden.device)
                copies[sequence.request_id].append(HostCopy(list_tokens(logits, following, count)))

    def wait() -> dict[str, bytes]:
        return {name: b"".join(own.tensor().numpy().tobytes() for own in listed) for name, listed in copies.items()}

    return wait


def list_tokens(logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
    """The rows of `RequestOutput.prompt_logprobs` for `token_ids`, int64 `[n]`, and the `count` likeliest, of logits
    `[n, vocab_size]`."""
    scores = logits.float().log_softmax(dim=-1)  # as the sampler's
    own = scores.gather(1, token_ids[:, None])
    rank = (scores >= own).sum(1, keepdim=True)  # as vLLM counts it
    best, ids = scores.topk(count, dim=-1)
    logprobs = torch.cat((own, best), 1)
    return torch.cat((rank.int(), token_ids[:, None].int(), ids.int(), logprobs.view(torch.int32)), 1)
