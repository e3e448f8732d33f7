"""The model against transformers, float32 at 1e-5, one rank."""

import pytest
import torch
from torch import Tensor

from mini_engine.kernels import avx2
from mini_engine.model.config import ModelConfig
from tests.support import script, tiny
from tests.support.checkpoints import load

EVERY_FAMILY = True
needs_fbgemm = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="not on x86")
NAMES = ["text", "image", "video", *tiny.ORDERS]
BFLOAT16_BOUND = 0.05  # of the largest logit
BOUNDS = {torch.bfloat16: BFLOAT16_BOUND, torch.float16: BFLOAT16_BOUND / 8}  # three more bits of fraction


def narrow_error(ours: Tensor, exact: Tensor, config: ModelConfig) -> Tensor:
    """The largest of a token; of the median token where rounding lets some choose other experts."""
    errors = (ours.float() - exact).abs().amax(1)
    return errors.median() if config.text.experts else errors.max()


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, model, checkpoint, family):
    tiny.assert_logits(script.logits(model, family, [name]), checkpoint.oracle, family)


@pytest.mark.parametrize("budget", [1 << 30, 29])
def test_logits_of_a_mixed_batch_equal_transformers(budget, model, checkpoint, family):
    """Of prompts at once, or in chunks that end inside of items, and of three tokens decoded after each.

    The first video outlasts the text behind it; what is decoded stands where it would as part of the prompt.
    """
    tiny.assert_logits(script.logits(model, family, NAMES, budget, count=4), checkpoint.oracle, family)


@pytest.mark.parametrize("layout", ["old", "new", "sharded"])
def test_every_checkpoint_layout_gives_the_same(layout, layouts, checkpoint, family):
    model = load(layouts[layout])
    assert model.config == checkpoint.config
    tiny.assert_logits(script.logits(model, family, ["image then video"]), checkpoint.oracle, family)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_fbgemm)])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_narrow_dtypes_stay_near(dtype, packed, checkpoint, family, monkeypatch):
    if packed:
        monkeypatch.setattr(avx2, "is_this_cpu", lambda: True)
        monkeypatch.setattr(avx2, "LEAST_PACKED", 1)
    model = load(checkpoint.path, dtype)
    assert any(isinstance(module, avx2.HalfMatrix) for module in model.modules()) is packed
    assert {p.dtype for p in model.parameters() if p.ndim > 1} == {dtype}
    assert model.decoder.rope.frequencies.dtype == model.visual.inv_freq.dtype == torch.float32
    found = script.logits(model, family, NAMES)
    for name, exact in tiny.logits(checkpoint.oracle, family, found).items():
        assert narrow_error(found[name], exact, checkpoint.config) < BOUNDS[dtype] * exact.abs().max(), name


@torch.inference_mode()
def test_rows_of_the_tower_in_one_call_and_in_slices_equal_transformers(model, checkpoint):
    """Windows of several sizes; the core encodes a long video over several steps."""
    grids = ((1, 6, 10), (3, 14, 4), (1, 4, 4), (2, 2, 2), (5, 6, 10))
    sizes = [t * h * w for t, h, w in grids]
    patches = torch.randn(sum(sizes), model.config.vision.patch_dim, generator=torch.Generator().manual_seed(4))
    together = model.encode_vision(patches, grids)
    assert [len(rows) for rows in together] == [size // 4 for size in sizes]
    output = checkpoint.oracle.model.visual(patches, torch.tensor(grids))
    theirs = torch.cat((output.pooler_output, *(getattr(output, "deepstack_features", None) or ())), dim=-1)
    torch.testing.assert_close(torch.cat(together), theirs, atol=1e-5, rtol=0)
    video = patches.split(sizes)[-1]
    parts = [model.encode_vision(part, [(len(part) // 60, 6, 10)])[0] for part in video.split(2 * 60)]
    torch.testing.assert_close(torch.cat(parts), together[-1], atol=1e-5, rtol=0)
