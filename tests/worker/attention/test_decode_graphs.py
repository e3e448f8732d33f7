"""Decode steps of padded sizes: recorded and replayed on CUDA, computed as they are on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mini_engine.model.parallel import TensorParallel
from mini_engine.model.weights import load_model
from mini_engine.worker.attention.sdpa import AttentionBackend, KVCache, SdpaBackend, Span, empty_blocks
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from tests.support import script, tiny
from tests.support.devices import INTERPRETED, device
from tests.worker.conftest import make_states

__all__ = ["device"]
pytest.importorskip("triton")
from mini_engine.worker.attention.decode_graphs import DecodeGraphs  # noqa: E402
from mini_engine.worker.attention.triton_attention import Tables, TritonBackend  # noqa: E402

BLOCKS = 64


class GraphRig:
    """A model, its cache, and graphs for at most 6 sequences."""

    def __init__(self, checkpoint: Path, device: torch.device, family: str = "qwen2_5_vl") -> None:
        self.family = family
        self.model = load_model(checkpoint, TensorParallel(), None, device)
        states = make_states(self.model, device)
        blocks = empty_blocks(self.model.attention_shape, BLOCKS + 1, 16, torch.float32, device)
        self.cache = KVCache(blocks, 1, states)
        # Finite alone where padding reads.
        self.cache.storage.fill_(float("nan"))[:, :, BLOCKS] = 0
        self.backend = TritonBackend(self.cache, 2048)
        self.graphs = DecodeGraphs(self.model, self.backend, 6, 2048)
        if device.type == "cuda":
            self.graphs.capture()
        self._normalise = Normalisation.from_dir(checkpoint)

    def runner(self, media: tiny.MemoryMedia, backend: AttentionBackend, graphs: DecodeGraphs | None) -> ModelRunner:
        return ModelRunner(self.model, backend, media, self._normalise, TensorParallel(), None, graphs)

    def tokens(self, backend: AttentionBackend, graphs: DecodeGraphs | None) -> dict[str, list[int]]:
        """Of requests that end one after the other, so that the steps get smaller; one restarts in other blocks."""
        media = tiny.MemoryMedia()
        requests = [new for new in tiny.mixed_requests(media, self.family) if new.request_id != "video"]
        if INTERPRETED:
            prompts = {"short": [17], "two": [3, 4], "almost a block": [*range(20, 35)]}
            requests = [tiny.make_request(media, *prompt, self.family) for prompt in prompts.items()]
        steps = script.write_steps(requests, 3 if INTERPRETED else 20, 48, 16, BLOCKS, preempt_at=(2,))
        assert max(len(step.chunks) for step in steps) == len(requests)
        return script.run(self.runner(media, backend, graphs), steps, ahead=1)


@pytest.fixture
def rig(device, checkpoint, family) -> GraphRig:
    return GraphRig(checkpoint, device, family)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"][INTERPRETED:], indirect=True, scope="session")
def test_the_tokens_are_those_of_steps_without_and_of_torchs_attention(rig):
    tokens = rig.tokens(rig.backend, rig.graphs)
    assert tokens == rig.tokens(SdpaBackend(rig.cache), None)
    if not INTERPRETED:  # where it would take its time
        assert tokens == rig.tokens(rig.backend, None)
    assert len({tuple(answer) for answer in tokens.values()}) == len(tokens)
    assert rig.cache.storage[:, :, BLOCKS].any(), "padding wrote to the spare block, and so to no block of another"


def test_tables_that_advance_are_those_that_are_built(device):
    """Over the ends of blocks and the last column."""
    starts, blocks = [250, 15, 0, 16], np.random.default_rng(0).permutation(4 * 20).reshape(4, 20)
    contexts = np.array(starts) + 1
    tables = Tables.of([Span(start, 1, row) for start, row in zip(starts, blocks, strict=True)], 16, device)
    for _ in range(40):
        entered = [(row, int(blocks[row, stop // 16])) for row, stop in enumerate(contexts.tolist()) if stop % 16 == 0]
        indices = blocks[range(4), contexts // 16] * 16 + contexts % 16
        contexts = contexts + 1
        tables.advance(torch.from_numpy(indices).to(device), contexts, entered)
        assert tables.contexts.tolist() == contexts.tolist()
        for row, stop in enumerate(contexts.tolist()):
            used = -(-stop // 16)
            assert tables.tables[row, :used].tolist() == blocks[row, :used].tolist()
    assert tables.tables.shape == (4, 32)
