"""What requests with `PoolingParams` return of the last row of their prompt. Knows nothing of steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.kernels.staging import HostCopy, to_device
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.batch import PooledRow


class PooledNumbers:
    """The numbers of a step's pooled rows, in transfer to the host. Making it is a collective.

    Args:
        hidden: `[n, hidden_size]` of the whole step, after the last norm.
    """

    def __init__(self, model: VisionLanguageModel, hidden: Tensor, pooled: Sequence[PooledRow]) -> None:
        ordered = sorted(pooled, key=lambda each: bool(each.token_ids))  # hidden states, then logits
        self._counts = {each.request_id: len(each.token_ids) or hidden.shape[1] for each in ordered}
        states = torch.tensor([each.row for each in ordered if not each.token_ids], dtype=torch.int64)
        numbers = hidden.index_select(0, to_device(states, hidden.device)).float().flatten()
        if scores := [(each.row, token) for each in ordered for token in each.token_ids]:
            rows, token_ids = to_device(torch.tensor(scores).T.contiguous(), hidden.device)
            numbers = torch.cat((numbers, model.logits_of(hidden, rows, token_ids)))
        self._numbers = HostCopy(numbers)

    def result(self) -> dict[str, bytes]:
        """See `StepResult.pooled`; waits for the numbers."""
        parts = self._numbers.tensor().split([*self._counts.values()])
        return {name: part.numpy().tobytes() for name, part in zip(self._counts, parts, strict=True)}
