"""Writes the steps that an engine core would send: fixed numbers of tokens, so that no step depends on a result."""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from mini_engine.messages import Chunk, EncodeItem, NewSequence, StateStart, Step
from mini_engine.worker.model_runner import Launched, ModelRunner


class _Running:
    def __init__(self, new: NewSequence, count: int) -> None:
        self.new = new
        self.total = len(new.prompt_token_ids) + (count if new.pooling is None else 1)
        self.computed = 0
        self.known = len(new.prompt_token_ids)
        self.blocks: list[int] = []
        self.started = self.restart = False
        self.state = 0
        self.announced = 0  # items


def write_steps(
    requests: Sequence[NewSequence],
    count: int,
    budget: int,
    block_size: int,
    num_blocks: int,
    preempt_at: Sequence[int] = (),
) -> list[Step]:
    """`count` tokens for each request that samples, chunks cut to `budget` tokens a step, blocks dealt in random order.

    At the steps in `preempt_at` the first running sequence loses its blocks and its state and starts again. An item is
    encoded when the first chunk needs it, and evicted with the last of the requests that have it.
    """
    states = list(range(len(requests)))
    free = random.Random(0).sample(range(num_blocks), num_blocks)
    running = [_Running(new, count) for new in requests]
    steps: list[Step] = []
    finished: list[_Running] = []
    encoded: set[bytes] = set()
    while running or finished:
        if len(steps) in preempt_at:
            free += running[0].blocks
            states.insert(0, running[0].state)
            running[0].computed, running[0].blocks, running[0].restart = 0, [], True
        unused = encoded - {item.media_hash for one in running for item in one.new.media}
        encoded -= unused
        step = Step(len(steps) + 1, finished=[one.new.request_id for one in finished], evict=sorted(unused))
        # Blocks are another's from the next step on: in this one they are still read.
        free += [block for one in finished for block in one.blocks]
        left, finished = budget, []
        for one in list(running):
            length = min(left, one.known - one.computed)
            if length == 0:
                continue
            left -= length
            stop = one.computed + length
            if one.computed == 0:
                one.state = states.pop()
                step.states.append(StateStart(one.new.request_id, one.state, None))
            _announce(one, step, stop, encoded)
            blocks = [free.pop() for _ in range(-(-stop // block_size) - len(one.blocks))]
            one.blocks += blocks
            samples = stop == one.known
            step.chunks.append(Chunk(one.new.request_id, one.computed, length, blocks, samples, one.restart))
            one.computed, one.known, one.restart = stop, one.known + samples, False
            if one.known == one.total:
                running.remove(one)
                finished.append(one)
                states.insert(0, one.state)
        steps.append(step)
    return steps


def _announce(one: _Running, step: Step, stop: int, encoded: set[bytes]) -> None:
    if not one.started:
        step.started.append(one.new)
        one.started = True
    while one.announced < len(one.new.media) and one.new.media[one.announced].offsets[0] < stop:
        item = one.new.media[one.announced]
        if item.media_hash not in encoded:
            encoded.add(item.media_hash)
            step.encode.append(EncodeItem(one.new.request_id, one.announced, 0, item.grid_thw[0]))
        step.release.append(item.patches.message)
        one.announced += 1


def run(runner: ModelRunner, steps: Sequence[Step], ahead: int = 0) -> dict[str, list[Any]]:
    """Execute the steps; tokens, or pooled numbers, by request. `ahead`: steps that are launched before the result of
    one is asked for."""
    tokens: dict[str, list[Any]] = {}
    launched: deque[tuple[int, Launched]] = deque()
    for step in [*steps, *[None] * ahead]:
        if step is not None:
            launched.append((step.number, runner.launch(step)))
        if len(launched) <= ahead and step is not None:
            continue
        number, done = launched.popleft()
        result = done.result()
        assert result.number == number
        for sampled in result.tokens:
            tokens.setdefault(sampled.request_id, []).append(sampled.token_id)
        for name, numbers in result.pooled.items():
            assert name not in tokens, "two outputs"
            tokens[name] = np.frombuffer(numbers, "<f4").tolist()
    assert not launched
    return tokens
