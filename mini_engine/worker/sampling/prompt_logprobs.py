"""The log probabilities of a prompt's own tokens. Knows nothing of requests but `SamplingParams.prompt_logprobs`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.kernels.staging import HostCopy, to_device
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.batch import ChunkRows

SLICE_BYTES = 1 << 26  # of logits in float32 at a time: the rows of a long prompt would take gigabytes


class PromptLogprobs:
    """Those of a step's prompts that ask for them, in transfer to the host. Making it is a collective.

    A prompt is computed again after a preemption; each of its rows is listed once, and so counted in its sequence.

    Args:
        hidden: `[n, hidden_size]` of the whole step, after the last norm.
        parts: the chunks of these prompts.
    """

    def __init__(self, model: VisionLanguageModel, hidden: Tensor, parts: Sequence[ChunkRows]) -> None:
        self._rows: dict[str, list[HostCopy]] = {}
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
                    listed = HostCopy(list_tokens(logits, following, count))
                    self._rows.setdefault(sequence.request_id, []).append(listed)

    def result(self) -> dict[str, bytes]:
        """See `StepResult.prompt_logprobs`; waits for the numbers. Empty on ranks but the first."""
        return {name: b"".join(part.tensor().numpy().tobytes() for part in parts) for name, parts in self._rows.items()}


def list_tokens(logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
    """The rows of `RequestOutput.prompt_logprobs` for `token_ids`, int64 `[n]`, and the `count` likeliest, of logits
    `[n, vocab_size]`."""
    scores = logits.float().log_softmax(dim=-1)  # as the sampler's
    own = scores.gather(1, token_ids[:, None])
    rank = (scores >= own).sum(1, keepdim=True)  # as vLLM counts it
    best, ids = scores.topk(count, dim=-1)
    logprobs = torch.cat((own, best), 1)
    return torch.cat((rank.int(), token_ids[:, None].int(), ids.int(), logprobs.view(torch.int32)), 1)
