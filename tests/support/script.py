"""Writes the steps that an engine core would send: fixed numbers of tokens, so that no step depends on a result; and
executes them."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mini_engine.messages import Chunk, EncodeItem, NewSequence, StateStart, Step
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.attention.recurrent_states import RecurrentStates
from mini_engine.worker.attention.sdpa import AttentionBackend, KVCache, empty_blocks
from mini_engine.worker.model_runner import Launched, ModelRunner
from mini_engine.worker.shared_collectives import meet
from tests.support import tiny

NUM_BLOCKS, BLOCK_SIZE = 256, 16
NUM_STATES = 32
T = TypeVar("T")


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
    preempt_at: Sequence[int] = (),
    block_size: int = BLOCK_SIZE,
    num_blocks: int = NUM_BLOCKS,
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


def run(
    runner: ModelRunner, steps: Sequence[Step], ahead: int = 0, listed: dict[str, bytes] | None = None
) -> dict[str, list[Any]]:
    """Execute the steps; tokens, or pooled numbers, by request. `ahead`: steps that are launched before the result of
    one is asked for. `listed` gets the log probabilities of prompts."""
    tokens: dict[str, list[Any]] = {}
    listed = {} if listed is None else listed
    launched: deque[tuple[int, Launched]] = deque()
    for step in [*steps, *[None] * ahead]:
        if step is not None:
            launched.append((step.number, runner.launch(step)))
        if len(launched) <= ahead and step is not None:
            continue
        number, done = launched.popleft()
        result = done.result()
        assert result.number == number
        for name, rows in result.prompt_logprobs.items():
            assert name not in tokens, "after a token"
            listed[name] = listed.get(name, b"") + rows
        for sampled in result.tokens:
            tokens.setdefault(sampled.request_id, []).append(sampled.token_id)
        for name, numbers in result.pooled.items():
            assert name not in tokens, "two outputs"
            tokens[name] = np.frombuffer(numbers, "<f4").tolist()
    assert not launched
    return tokens


def make_cache(
    model: VisionLanguageModel, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE, spare: int = 0
) -> KVCache:
    """Blocks and states with what an earlier owner may have left, but for the spare state: nothing of it may reach a
    result."""
    weight, states = next(model.parameters()), None
    blocks = empty_blocks(model.attention_shape, num_blocks + spare, block_size, weight.dtype, weight.device)
    if model.state_shape is not None:
        states = RecurrentStates(model.state_shape, NUM_STATES, weight.dtype, weight.device)
        states.conv[:, :-1] = states.delta[:, :-1] = float("nan")
        states.conv[:, -1] = states.delta[:, -1] = 0
    return KVCache(blocks.fill_(float("nan")), spare, states)


def make_runner(
    model: VisionLanguageModel, media: tiny.MemoryMedia, tp: TensorParallel | None = None, **cache: int
) -> ModelRunner:
    """On the CPU. `cache`: arguments of `make_cache`."""
    backend = AttentionBackend(make_cache(model, **cache))
    return ModelRunner(model, backend, media, tiny.NORMALISE, tp or TensorParallel())


@torch.inference_mode()
def logits(
    model: VisionLanguageModel,
    family: str,
    names: Iterable[str],
    budget: int = 1 << 30,
    count: int = 1,
    tp: TensorParallel | None = None,
) -> dict[str, Tensor]:
    """Of the requests with these names of `tiny.py`, `[tokens, vocab_size]`: of the prompt's tokens, and of all but the
    last of `count` that follow. None on ranks but the first."""
    media, hidden, found = tiny.MemoryMedia(), list[Tensor](), dict[str, list[Tensor]]()
    requests = tiny.mixed_requests(media, family, names, logit_bias={tiny.FOLLOWING: 1e4})
    runner = make_runner(model, media, tp)
    hook = model.register_forward_hook(lambda _, __, output: hidden.append(output))
    for step in write_steps(requests, count, budget):
        runner.execute(step)
        rows = model.logits(hidden.pop()) if step.chunks else None
        if rows is not None:
            # As attention wants them, see `AttentionBackend.step`.
            chunks = sorted(step.chunks, key=lambda each: (each.num_tokens > 1, -each.start - each.num_tokens))
            for chunk, part in zip(chunks, rows.split([each.num_tokens for each in chunks]), strict=True):
                found.setdefault(chunk.request_id, []).append(part)
    hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def on_ranks(size: int, folder: Path, work: Callable[[TensorParallel], T]) -> list[T]:
    """What `work` returns on each rank, in threads of this process. `folder`: for sockets."""

    def run(rank: int) -> T:
        collectives = meet(folder / "ranks", rank, size, 60.0, 60.0)
        try:
            return work(TensorParallel(rank, size, collectives))
        finally:
            collectives.close()  # so a rank that fails ends the others

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
