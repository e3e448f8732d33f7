"""The tower's layout of segments, and several items in one call."""

import pytest
import torch

from mini_engine.model import vision
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision import layout, segment_attention
from mini_engine.model.weights import load_model

EVERY_FAMILY = True
CPU = torch.device("cpu")
GRIDS = ((1, 6, 10), (3, 14, 4), (1, 4, 4), (2, 2, 2))


def segments_of(order: torch.Tensor, groups) -> set[frozenset[int]]:
    lengths = [length for count, length in groups for _ in range(count)]
    return {frozenset(part.tolist()) for part in order.split(lengths)}


def expected_segments(window: int) -> tuple[set[frozenset[int]], set[frozenset[int]]]:
    """Windows and frames as sets of the processor's patch numbers, by walking every patch."""
    windows: dict[tuple, set[int]] = {}
    frames: dict[tuple, set[int]] = {}
    patch = 0
    for item, (t, h, w) in enumerate(GRIDS):
        for frame in range(t):
            for row in range(h // 2):
                for col in range(w // 2):
                    for _ in range(4):
                        windows.setdefault((item, frame, row // window, col // window), set()).add(patch)
                        frames.setdefault((item, frame), set()).add(patch)
                        patch += 1
    return {frozenset(s) for s in windows.values()}, {frozenset(s) for s in frames.values()}


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_segments_are_windows_and_frames(window):
    where = layout(GRIDS, 2, window, CPU)
    windows, frames = expected_segments(window)
    assert segments_of(where.patches, where.windows.groups) == windows
    in_frames = where.patches if where.frames.order is None else where.patches[where.frames.order]
    assert segments_of(in_frames, where.frames.groups) == frames
    assert torch.equal(where.patches.view(-1, 4)[:, 0][where.merged], torch.arange(0, len(where.patches), 4))


def test_windows_of_one_length_leave_the_frames_whole():
    """Then no layer has to move its patches; a last column of narrower windows lies apart from its frame."""
    assert layout(((4, 4, 8),), 2, 2, CPU).frames.order is None
    assert layout(((4, 4, 6),), 2, 2, CPU).frames.order is not None


def test_segment_attention_equals_a_masked_softmax():
    groups = [(3, 4), (1, 5)]
    q, k, v = torch.randn(3, 17, 2, 8, generator=torch.Generator().manual_seed(0))
    segment = torch.tensor([0] * 4 + [1] * 4 + [2] * 4 + [3] * 5)
    scores = torch.einsum("nhd,mhd->hnm", q, k) / 8**0.5
    weights = scores.masked_fill(segment[:, None] != segment, float("-inf")).softmax(-1)
    expected = torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)
    torch.testing.assert_close(segment_attention(q, k, v, groups), expected, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_items_in_one_call_equal_each_alone_and_transformers(checkpoint):
    model = load_model(checkpoint.path, TensorParallel(), None, CPU)
    sizes = [t * h * w for t, h, w in GRIDS]
    patches = torch.randn(sum(sizes), model.config.vision.patch_dim, generator=torch.Generator().manual_seed(4))
    together = model.encode_vision(patches, GRIDS)
    assert [len(rows) for rows in together] == [size // 4 for size in sizes]
    output = checkpoint.oracle.model.visual(patches, torch.tensor(GRIDS))
    theirs = torch.cat((output.pooler_output, *(getattr(output, "deepstack_features", None) or ())), dim=-1)
    torch.testing.assert_close(torch.cat(together), theirs, atol=1e-5, rtol=0)
    for rows, part, grid in zip(together, patches.split(sizes), GRIDS, strict=True):
        torch.testing.assert_close(model.encode_vision(part, [grid])[0], rows, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_video_in_slices_of_whole_grids_equals_the_whole(checkpoint):
    """The core encodes a long video over several steps."""
    model = load_model(checkpoint.path, TensorParallel(), None, CPU)
    per_grid = 6 * 10
    patches = torch.randn(5 * per_grid, model.config.vision.patch_dim, generator=torch.Generator().manual_seed(5))
    (whole,) = model.encode_vision(patches, [(5, 6, 10)])
    parts = [model.encode_vision(part, [(len(part) // per_grid, 6, 10)])[0] for part in patches.split(2 * per_grid)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-6)


def test_a_layout_reaches_the_device_without_a_wait(monkeypatch):
    """All of its tensors by the one function whose copies wait for nothing."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(vision, "to_device", lambda tensor, _: sent.append(tensor) or tensor)
    made = layout.__wrapped__(GRIDS, 2, 2, CPU)
    where = (made.patches, made.merged, made.coordinates, made.sizes, made.frames.order, made.frames.inverse)
    assert {id(tensor) for tensor in where} == {id(tensor) for tensor in sent}
