"""A step that the device may still be at, and its tokens, for which the host waits when it has nothing better to do."""

from __future__ import annotations

import msgspec
import torch

from mini_engine.messages import SampledToken, StepResult
from mini_engine.worker.batch import FlatBatch
from mini_engine.worker.decode_batch import DecodeBatch
from mini_engine.worker.sampler import Sampled
from mini_engine.worker.staging import HostCopy


class Sampling:
    """The tokens of a step, on their way to the host.

    Args:
        tokens: those of `batch.sampled`, in order.
        decode: what keeps the tokens; None: each goes into its sequence.
        sampled: what is said of them; None on a rank that reports nothing.
    """

    def __init__(self, tokens: HostCopy, batch: FlatBatch, decode: DecodeBatch | None, sampled: Sampled | None) -> None:
        self._tokens, self._batch, self._decode, self._sampled = tokens, batch, decode, sampled
        self._result: list[SampledToken] | None = None

    def result(self) -> list[SampledToken]:
        """Waits for the tokens, and at the first call puts them where the sequences are."""
        if self._result is None:
            self._result = self._take(self._tokens.values())
        return self._result

    def _take(self, tokens: list[int]) -> list[SampledToken]:
        if self._decode is not None:
            self._decode.take(tokens)
        else:
            for sequence, stop, token in zip(self._batch.sampled, self._batch.stops.tolist(), tokens, strict=True):
                sequence.tokens.put(stop, token)  # later ones, from before a restart, are gone
        if self._sampled is None:
            return []
        result = list(map(SampledToken, self._batch.names, tokens))
        for i, report in self._sampled.logprobs.items():
            result[i] = SampledToken(result[i].request_id, result[i].token_id, report)
        return result


class Launched:
    """A step of which the host has done its part. `done`: when the device has; None where none is to wait for.

    `result` lacks the tokens, which are those of `sampling`.
    """

    def __init__(self, result: StepResult, sampling: Sampling | None, device: torch.device) -> None:
        self._result, self._sampling = result, sampling
        self.done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.done = torch.cuda.Event(blocking=True)
            self.done.record()

    def result(self) -> StepResult:
        """Waits for the device."""
        tokens = self._sampling.result() if self._sampling is not None else []
        if self.done is not None:
            self.done.synchronize()
        return msgspec.structs.replace(self._result, tokens=tokens)
