"""Decode steps of padded sizes: recorded and replayed on CUDA, computed as they are on the CPU."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mini_engine.model.parallel import TensorParallel
from mini_engine.model.weights import load_model
from mini_engine.worker.attention import AttentionBackend, make_backend
from mini_engine.worker.device_memory import HUNGRY_SAMPLING
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from tests.kernels.devices import INTERPRETED, device
from tests.worker import script, tiny

__all__ = ["device"]
pytest.importorskip("triton")
from mini_engine.worker.decode_graphs import DecodeGraphs, DecodeStep, sizes  # noqa: E402

BLOCKS = 64
HUNGRY = {name: getattr(HUNGRY_SAMPLING, name) for name in ("repetition_penalty", "presence_penalty", "logprobs")}


class World:
    """A model, its cache, and graphs for at most 6 sequences."""

    def __init__(self, checkpoint: Path, device: torch.device) -> None:
        self.model = load_model(checkpoint, TensorParallel(), None, device)
        self.cache = KVCache.allocate(self.model.attention_shape, BLOCKS, 16, torch.float32, device, spare=1)
        # Finite alone where padding reads.
        self.cache.storage.fill_(float("nan"))[:, :, BLOCKS] = 0
        self.backend = make_backend("triton", self.cache, 2048)
        self.graphs = DecodeGraphs(self.model, self.backend, 6, 2048)
        if device.type == "cuda":
            self.graphs.capture()
        self._normalise = Normalisation.from_dir(checkpoint)

    def tokens(self, backend: AttentionBackend, graphs: DecodeGraphs | None) -> dict[str, list[int]]:
        """Of requests that end one after the other, so that the steps get smaller; one restarts in other blocks."""
        media = tiny.MemoryMedia()
        names = ("text", "short", "block") if INTERPRETED else ("image", "text", "two", "short", "block")
        requests = [new for new in tiny.mixed_requests(media) if new.request_id in names]
        steps = script.write_steps(requests, 4 if INTERPRETED else 20, 48, 16, BLOCKS, preempt_at=(3,))
        assert max(len(step.chunks) for step in steps) == len(names)
        runner = ModelRunner(self.model, backend, media, self._normalise, TensorParallel(), None, graphs)
        return script.run(runner, steps, ahead=1)


@pytest.fixture
def world(device, checkpoint) -> World:
    return World(checkpoint, device)


def test_the_tokens_are_those_of_steps_without_and_of_torchs_attention(world):
    tokens = world.tokens(world.backend, world.graphs)
    assert tokens == world.tokens(make_backend("sdpa", world.cache, 2048), None)
    if not INTERPRETED:  # where it would take its time
        assert tokens == world.tokens(world.backend, None)
    assert len({tuple(answer) for answer in tokens.values()}) == len(tokens)
    assert world.cache.storage[:, :, BLOCKS].any(), "padding wrote to the spare block"


def decode_rows(world: World, rows: int) -> None:
    """A step of sequences 0, 1, ...: the fourth token of each goes to place 3 of the block with its number."""
    device = world.cache.storage.device
    tables = torch.arange(rows, dtype=torch.int32, device=device).repeat(16, 1).T.contiguous()
    ids = torch.arange(rows, device=device)
    positions = torch.full((3, rows), 3, device=device)
    contexts = torch.full((rows,), 4, dtype=torch.int32, device=device)
    step = world.graphs._steps[bisect.bisect_left(world.graphs._sizes, rows)]
    with torch.inference_mode():
        step.run(ids, positions, 16 * ids + 3, tables, contexts)


def test_padding_leaves_the_blocks_of_others_alone(world):
    """Steps of several sizes, in one memory: the rows that fell away must not write where they did, whatever size."""
    cache = world.cache
    for rows in (5, 2, 6, 1, 3, 5):
        cache.storage.zero_()
        decode_rows(world, rows)
        assert all(cache.storage[:, :, block, 3].any() for block in range(rows))
        assert not cache.storage[:, :, rows:BLOCKS].any()


def test_all_sizes_lie_in_one_memory(world):
    """At 128,000 tokens a row of a block table has 32 KB: each size with its own would take a gigabyte and more."""
    steps = world.graphs._steps
    for place in ("_token_ids", "_positions", "_hidden"):
        assert len({getattr(step, place).data_ptr() for step in steps}) == 1
    assert len({id(step._attend.decode.tables) for step in steps}) == 1
    assert all(step._positions.is_contiguous() for step in steps)


def test_sizes():
    assert sizes(1) == [1]
    assert sizes(6) == [1, 2, 4, 6]
    assert sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]


def test_the_largest_size_is_recorded_first_and_all_into_one_pool(checkpoint, monkeypatch):
    """With a recorder in the place of CUDA's, which replays a step by writing its size to where the result lies."""
    model = load_model(checkpoint, TensorParallel(), None, torch.device("cpu"))
    cache = KVCache.allocate(model.attention_shape, 4, 16, torch.float32, torch.device("cpu"), spare=1)
    graphs = DecodeGraphs(model, make_backend("triton", cache, 64), 6, 64)
    computed: list[tuple[int, object]] = []
    pool: list[object] = [None]  # of the recording that is under way

    class Graph:
        def replay(self) -> None:
            step = next(step for step in graphs._steps if step._replay == self.replay)
            step._hidden.fill_(len(step._hidden))

    @contextlib.contextmanager
    def record(graph: Graph, **given: object) -> Iterator[None]:
        assert given["capture_error_mode"] == "thread_local"
        pool[0] = given["pool"]
        yield
        pool[0] = None

    monkeypatch.setattr(DecodeStep, "_compute", lambda step: computed.append((len(step._hidden), pool[0])))
    for name, fake in {"CUDAGraph": Graph, "graph": record, "graph_pool_handle": lambda: "the pool"}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs.capture()
    assert computed == [(size, where) for size in (6, 4, 2, 1) for where in (None, "the pool")]
    tables, ones = torch.zeros(3, 16, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    with torch.inference_mode():
        hidden = graphs._steps[2].run(torch.arange(3), torch.zeros(3, 3), torch.arange(3), tables, ones)
    assert hidden.shape[0] == 3 and hidden.eq(4).all() and len(computed) == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "top_p": 0.5},
        {"repetition_penalty": 1.05},
        {**HUNGRY, "temperature": 0.8, "logit_bias": {5: 1.0}, "min_tokens": 20, "stop_token_ids": [7, 8]},
    ],
)
def test_a_step_that_goes_on_waits_for_nothing(sampling, checkpoint):
    """Torch raises where it would wait for the device."""
    world = World(checkpoint, torch.device("cuda", 0))
    media = tiny.MemoryMedia()
    requests = [new for new in tiny.mixed_requests(media, **sampling) if new.request_id in ("text", "short", "block")]
    steps = script.write_steps(requests, 30, 1000, 16, BLOCKS)
    runner = ModelRunner(
        world.model, world.backend, media, Normalisation.from_dir(checkpoint), TensorParallel(), None, world.graphs
    )
    script.run(runner, steps[:3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        script.run(runner, steps[3:29], ahead=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
