"""The worker's part of a decode step by itself: the same `ModelRunner` and the same steps, in this process, with no
engine core and no messages; and within it the time that the model takes.

This file imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mini_engine.bench.stopwatch import Stopwatch
from mini_engine.config import EngineConfig
from mini_engine.host import resolve_model
from mini_engine.messages import (
    Chunk,
    MediaCachePlan,
    MessageId,
    NewRequest,
    NewSequence,
    Step,
    TensorHandle,
)
from mini_engine.model.parallel import TensorParallel
from mini_engine.transport.arena import ReadableMemory
from mini_engine.worker.memory import profile
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.worker import choose_backend, choose_device, choose_num_blocks, load, make_attention

MODEL_PARTS = ("embed", "forward", "logits")  # together they are "the model's forward"


@dataclass(frozen=True)
class WorkerTime:
    """Means over the timed steps, in seconds."""

    forward: float  # embedding, layers and logits
    execute: float  # all of `ModelRunner.execute`: forward, the batch's layout, sampling, tokens
    forward_cpu: float  # as `forward`, in time on a CPU: what a busy machine does not stretch
    execute_cpu: float


class NoMedia:
    """For steps without media."""

    store: ReadableMemory | None = None

    def check(self) -> None:
        pass

    def rows(self, handle: TensorHandle, first: int, stop: int) -> torch.Tensor:
        raise KeyError(handle, first, stop)

    def release(self, messages: list[MessageId]) -> None:
        pass

    def register_store(self, nbytes: int) -> None:
        pass

    def drop_sender(self, incarnation: int) -> None:
        pass


class WorkerAlone:
    """Rank 0 of 1, with one torch thread: that is set for this whole process."""

    def __init__(self, config: EngineConfig):
        torch.set_num_threads(1)
        model_dir, device, tp = resolve_model(config), choose_device(config, 0, 0), TensorParallel()
        model = load(model_dir, config, tp, device)
        self._in_model = Stopwatch(torch.cuda.synchronize if device.type == "cuda" else lambda: None)
        for name in MODEL_PARTS:
            setattr(model, name, self._in_model.wrap(getattr(model, name)))
        normalise = Normalisation.from_dir(model_dir)
        backend = choose_backend(config.attention_backend, device)

        def runner_with(num_blocks: int) -> ModelRunner:
            return ModelRunner(model, make_attention(config, model, backend, num_blocks), NoMedia(), normalise, tp)

        nothing_sent = MediaCachePlan("off", 0, "nothing is sent")
        use = profile(config, model_dir, nothing_sent, model.config, device, runner_with)
        self._runner = runner_with(choose_num_blocks(config, model, use))

    def decode(self, requests: Sequence[NewRequest], warm_up: int, steps: int) -> WorkerTime:
        """Prefill the requests in one step and decode them together, one token each a step: `warm_up` steps unseen,
        then `steps` timed ones."""
        size = self._runner.block_size
        length = len(requests[0].prompt_token_ids)
        assert all(len(request.prompt_token_ids) == length for request in requests)
        per_sequence = -(-(length + warm_up + steps) // size)
        tables = [range(number * per_sequence, (number + 1) * per_sequence) for number in range(len(requests))]
        names = [request.request_id for request in requests]
        started = [NewSequence(new.request_id, new.prompt_token_ids, new.sampling, []) for new in requests]
        held = -(-length // size)
        chunks = [Chunk(name, 0, length, list(table[:held]), True) for name, table in zip(names, tables, strict=True)]
        self._runner.execute(Step(0, started=started, chunks=chunks))
        model, whole = self._in_model, Stopwatch()
        execute = whole.wrap(self._runner.execute)
        for number in range(warm_up + steps):
            if number == warm_up:
                model.reset()
                whole.reset()
            start = length + number
            added = range(held, held + 1) if start == held * size else range(0)
            held += len(added)
            chunks = [
                Chunk(name, start, 1, [table[block] for block in added], True)
                for name, table in zip(names, tables, strict=True)
            ]
            execute(Step(number, chunks=chunks))
        self._runner.execute(Step(0, finished=names))
        return WorkerTime(model.wall / steps, whole.wall / steps, model.cpu / steps, whole.cpu / steps)
