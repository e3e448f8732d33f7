"""A decode batch that is carried on from step to step is the one that a plain rebuild gives, whatever happens to its
sequences in between."""

import itertools
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from mini_engine.config import BUNDLED_MODEL
from mini_engine.kernels import ops
from mini_engine.model.config import ModelConfig
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker.attention import sdpa as attention
from mini_engine.worker.attention.sdpa import AttentionBackend, KVCache, empty_blocks
from mini_engine.worker.batch import DecodeBatch, SequenceState, build_batch
from tests.support import script, tiny


@pytest.mark.parametrize(("pad_blocks", "group_blocks"), [(0, 1 << 30), (1 << 30, 1 << 30), (2, 12), (1, 1 << 30)])
def test_a_batch_that_is_carried_on_is_the_one_that_is_built(pad_blocks, group_blocks, monkeypatch):
    """Each sequence has a prompt in chunks, restarts once in other blocks, and ends; some steps go without it, and some
    give it blocks one step early. A batch is carried on wherever the same sequences decode again."""
    blocks = empty_blocks(AttentionShape(1, 1, 8), 6 * 40, 4, torch.float32, torch.device("cpu"))
    cache, vision = KVCache(blocks.normal_()), ModelConfig.from_dir(BUNDLED_MODEL).vision
    monkeypatch.setattr(attention, "PAD_BYTES", pad_blocks * cache.block_bytes)
    monkeypatch.setattr(attention, "GROUP_BYTES", group_blocks * cache.block_bytes)
    draw, backend, carried = random.Random(0), AttentionBackend(cache), 0
    for _ in range(20):
        scripts, kept, before = [], None, None
        for number in range(draw.randrange(1, 7)):
            new = tiny.make_request(tiny.MemoryMedia(), f"r{number}", range(3, draw.randrange(4, 34)))
            steps = script.write_steps([new], 40, 6, [draw.randrange(40)], block_size=4, num_blocks=40)
            chunks = [
                replace(chunk, block_ids=[40 * number + block for block in chunk.block_ids])
                for step in steps
                for chunk in step.chunks
            ]
            for chunk, following in itertools.pairwise(chunks):
                if not following.restart and draw.random() < 0.1:
                    chunk.block_ids.extend(following.block_ids)
                    following.block_ids.clear()
            scripts.append((SequenceState(new, vision, 4), chunks))
        while any(chunks for _, chunks in scripts):
            work = [(chunks.pop(0), state) for state, chunks in scripts if chunks and draw.random() < 0.98]
            if not work:
                continue
            for chunk, state in work:
                state.add_blocks(chunk)
            batch = build_batch(work, 4)
            attend = backend.step(batch.cache_indices, batch.spans)
            names = [state.request_id for _, state in work] if batch.decodes else None
            is_same = names is not None and names == before
            assert (kept is not None and kept.advance([chunk for chunk, _ in work])) == is_same
            if is_same:
                carried += 1
                assert kept.batch.decodes and kept.batch.sampled == batch.sampled
                for field in ("stops", "token_ids", "positions", "cache_indices", "last_rows"):
                    assert np.array_equal(getattr(kept.batch, field), getattr(batch, field)), field
                heads = ops.Heads(torch.randn(len(work), 4, 8), 1, *ops.rotary_tables(torch.randn(len(work), 4)))
                assert torch.equal(kept.attend(0, heads), attend(0, heads))
            else:
                kept = DecodeBatch([chunk for chunk, _ in work], batch, attend, backend) if batch.decodes else None
            tokens = torch.tensor([draw.randrange(190) for _ in batch.sampled])
            if kept is not None:
                kept.feed(tokens)
            for state, stop, token in zip(batch.sampled, batch.stops.tolist(), tokens.tolist(), strict=True):
                state.tokens[stop] = token
            before = names
    assert carried > 400
