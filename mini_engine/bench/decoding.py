"""A worker's `ModelRunner` in this process, and batches that decode on it: for `step` and `gpu`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from mini_engine.config import EngineConfig
from mini_engine.host import resolve_model
from mini_engine.messages import Chunk, NewSequence, SamplingParams, Step
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.model_runner import Launched, ModelRunner
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.worker import (
    choose_backend,
    choose_device,
    load,
    make_attention,
    make_graphs,
    record_graphs,
)  # fmt: skip

NO_MEDIA: Any = SimpleNamespace(store=None, check=lambda: None, release=lambda _: None)
"""In place of `MediaInputs`, for steps without media."""


def make_runner(config: EngineConfig, batch: int, longest: int) -> tuple[ModelRunner, VisionLanguageModel]:
    """The only rank's runner, with a KV cache for `batch` sequences of `longest` tokens; and its model."""
    torch.set_num_threads(1)
    model_dir, device, tp = resolve_model(config), choose_device(config, 0, 0), TensorParallel()
    model = load(model_dir, config, tp, device)
    backend = choose_backend(config.attention_backend, device)
    attention = make_attention(config, model, backend, batch * -(-longest // config.block_size))
    graphs = make_graphs(config, model, attention)
    runner = ModelRunner(model, attention, NO_MEDIA, Normalisation.from_dir(model_dir), tp, None, graphs)
    record_graphs(runner)
    return runner, model


class Decoding:
    """`batch` sequences that decode together from `context` tokens on, of which the cache counts as filled with the
    first `cached`, as after a hit in the prefix cache; one step computes the others."""

    def __init__(self, runner: ModelRunner, batch: int, context: int, cached: int):
        self._runner = runner
        self._names = [f"bench-{number}" for number in range(batch)]
        self._positions = itertools.count(context)
        # Of each sequence the blocks that it has yet to fill.
        self._blocks = [iter(range(number, runner.num_blocks, batch)) for number in range(batch)]
        held = -(-context // runner.block_size)
        params = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)
        started = [NewSequence(name, [7] * context, params, []) for name in self._names]
        chunks = [
            Chunk(name, cached, context - cached, list(itertools.islice(blocks, held)), True)
            for name, blocks in zip(self._names, self._blocks, strict=True)
        ]
        runner.execute(Step(0, started=started, chunks=chunks))

    def run(self, steps: int) -> None:
        """So many steps, each launched before the tokens of the one before are taken, as in a worker."""
        before: Launched | None = None
        for position in itertools.islice(self._positions, steps):
            new_block = position % self._runner.block_size == 0
            chunks = [
                Chunk(name, position, 1, [next(blocks)] if new_block else [], True)
                for name, blocks in zip(self._names, self._blocks, strict=True)
            ]
            launched = self._runner.launch(Step(position, chunks=chunks))
            if before is not None:
                before.result()
            before = launched
        if before is not None:
            before.result()

    def end(self) -> None:
        """Forget the sequences."""
        self._runner.execute(Step(0, finished=self._names))
