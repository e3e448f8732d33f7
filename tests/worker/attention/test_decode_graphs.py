"""Decode steps of padded sizes: recorded and replayed on CUDA, computed as they are on the CPU."""

import numpy as np
import pytest
import torch

from mini_engine.model.parallel import TensorParallel
from mini_engine.model.weights import load_model
from mini_engine.worker.attention.sdpa import AttentionBackend, Span
from mini_engine.worker.model_runner import ModelRunner
from tests.support import script, tiny
from tests.support.devices import INTERPRETED

pytest.importorskip("triton")
from mini_engine.worker.attention.decode_graphs import DecodeGraphs  # noqa: E402
from mini_engine.worker.attention.triton_attention import Tables, TritonBackend  # noqa: E402

BLOCKS = 64


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"][INTERPRETED:], indirect=True, scope="session")
def test_the_tokens_are_those_of_steps_without_and_of_torchs_attention(device, checkpoint, family):
    """Of requests that end one after the other, so that the steps get smaller; one restarts in other blocks."""
    model = load_model(checkpoint.path, TensorParallel(), None, device)
    if INTERPRETED:
        del model.decoder.layers[2:]  # one of each kind stays
    cache = script.make_cache(model, BLOCKS, spare=1)
    cache.storage[:, :, BLOCKS] = 0  # finite alone where padding reads
    backend = TritonBackend(cache, 2048)
    graphs = DecodeGraphs(model, backend, 6, 2048)
    if device.type == "cuda":
        graphs.capture()

    def run(backend: AttentionBackend, graphs: DecodeGraphs | None) -> dict[str, list[int]]:
        media = tiny.MemoryMedia()
        requests = tiny.mixed_requests(media, family, [name for name in tiny.SHAPES if name != "video"])
        if INTERPRETED:
            prompts = {"short": [17], "two": [3, 4], "almost a block": [*range(20, 35)]}
            requests = [tiny.make_request(media, *prompt, family) for prompt in prompts.items()]
        steps = script.write_steps(requests, 3 if INTERPRETED else 20, 48, (2,), num_blocks=BLOCKS)
        assert max(len(step.chunks) for step in steps) == len(requests)
        runner = ModelRunner(model, backend, media, tiny.NORMALISE, TensorParallel(), None, graphs)
        return script.run(runner, steps, ahead=1)

    tokens = run(backend, graphs)
    assert tokens == run(AttentionBackend(cache), None)
    if not INTERPRETED:  # where it would take its time
        assert tokens == run(backend, None)
    assert len({tuple(answer) for answer in tokens.values()}) == len(tokens)
    assert cache.storage[:, :, BLOCKS].any(), "padding wrote to the spare block, and so to no block of another"


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
