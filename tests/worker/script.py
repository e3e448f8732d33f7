"""Writes the steps that an engine core would send: fixed numbers of tokens, so that no step depends on a result."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mini_engine.messages import Chunk, EncodeItem, NewSequence, SampledToken, Step
from mini_engine.worker.model_runner import ModelRunner


class _Running:
    def __init__(self, new: NewSequence, count: int) -> None:
        self.new = new
        self.total = len(new.prompt_token_ids) + count
        self.computed = 0
        self.known = len(new.prompt_token_ids)
        self.started = False
        self.encoded = 0
        self.blocks = 0


def write_steps(
    requests: Sequence[NewSequence],
    count: int,
    budget: int,
    block_size: int,
    num_blocks: int,
    preempt_at: Sequence[int] = (),
    seed: int = 0,
) -> list[Step]:
    """`count` tokens for each request, chunks cut to `budget` tokens a step, blocks dealt in random order.

    At the steps in `preempt_at` the first running sequence loses its blocks and starts anew.
    """
    free = random.Random(seed).sample(range(num_blocks), num_blocks)
    running = [_Running(new, count) for new in requests]
    owned: dict[str, list[int]] = {new.request_id: [] for new in requests}
    steps: list[Step] = []
    finished: list[str] = []
    while running or finished:
        if len(steps) in preempt_at:
            running[0].computed = running[0].blocks = 0
            free += owned.pop(running[0].new.request_id)
            owned[running[0].new.request_id] = []
        step = Step(len(steps) + 1, finished=finished, started=[], encode=[], chunks=[], release=[])
        # Blocks are another's from the next step on: in this one they are still read.
        free += [block for request_id in finished for block in owned.pop(request_id)]
        left, finished = budget, []
        for one in list(running):
            length = min(left, one.known - one.computed)
            if length == 0:
                continue
            left -= length
            _announce(one, step, one.computed + length)
            needed = -(-(one.computed + length) // block_size) - one.blocks
            blocks = [free.pop() for _ in range(needed)]
            owned[one.new.request_id] += blocks
            one.blocks += needed
            samples = one.computed + length == one.known
            step.chunks.append(Chunk(one.new.request_id, one.computed, length, blocks, samples))
            one.computed += length
            one.known += samples
            if one.known == one.total:
                running.remove(one)
                finished.append(one.new.request_id)
        steps.append(step)
    return steps


def _announce(one: _Running, step: Step, stop: int) -> None:
    if not one.started:
        step.started.append(one.new)
        one.started = True
    while one.encoded < len(one.new.media) and one.new.media[one.encoded].offset < stop:
        step.encode.append(EncodeItem(one.new.request_id, one.encoded))
        step.release.append(one.new.media[one.encoded].patches.message)
        one.encoded += 1


def run(runner: ModelRunner, steps: Sequence[Step]) -> dict[str, list[int]]:
    """Execute the steps; tokens by request."""
    tokens: dict[str, list[int]] = {}
    for step in steps:
        result = runner.execute(step)
        assert result.number == step.number
        for sampled in result.tokens:
            assert isinstance(sampled, SampledToken)
            tokens.setdefault(sampled.request_id, []).append(sampled.token_id)
    return tokens
