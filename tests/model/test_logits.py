"""The model against transformers, float32 at 1e-5, one rank."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mini_engine.kernels import avx2
from mini_engine.model.config import ModelConfig
from mini_engine.model.vision_language import VisionLanguageModel
from tests.model.reference import ReferenceAttention, in_dtype, load, place, reference_logits

EVERY_FAMILY = True
needs_fbgemm = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="not on x86")
CPU = torch.device("cpu")
BFLOAT16_BOUND = 0.05  # of the largest logit
BOUNDS = {torch.bfloat16: BFLOAT16_BOUND, torch.float16: BFLOAT16_BOUND / 8}  # three more bits of fraction


def narrow_error(ours: Tensor, exact: Tensor, config: ModelConfig) -> Tensor:
    """The largest of a token; of the median token where rounding lets some choose other experts."""
    errors = (ours.float() - exact).abs().amax(1)
    return errors.median() if config.text.experts else errors.max()


@pytest.fixture(scope="module")
def model(checkpoint) -> VisionLanguageModel:
    return load(checkpoint.path)


@torch.inference_mode()
def test_logits_equal_transformers_alone_and_in_a_mixed_batch(model, checkpoint, oracle, prompts):
    together = reference_logits(model, list(prompts.values()))
    for prompt, in_batch in zip(prompts.values(), together, strict=True):
        expected = oracle(checkpoint.oracle, prompt)
        torch.testing.assert_close(reference_logits(model, [prompt])[0], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(in_batch, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["old", "new", "sharded"])
@torch.inference_mode()
def test_every_checkpoint_layout_gives_the_same(layout, layouts, checkpoint, oracle, prompts):
    model, prompt = load(layouts[layout]), prompts["image then video"]
    assert model.config == checkpoint.config
    torch.testing.assert_close(
        reference_logits(model, [prompt])[0], oracle(checkpoint.oracle, prompt), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", ["two videos", "video then images", "image then video"])
@torch.inference_mode()
def test_chunked_prefill_and_decode_equal_one_pass(name, model, checkpoint, oracle, prompts):
    """Three tokens decoded at `next_position + i`, after a prefill cut in the middle of an item.

    The first video outlasts the text behind it; what is decoded stands where it would as part of the prompt.
    """
    prompt, tail, attend = prompts[name], [21, 22, 23], ReferenceAttention(model.state_shape)
    whole = oracle(checkpoint.oracle, replace(prompt, token_ids=[*prompt.token_ids, *tail]))
    outputs = reference_logits(model, [prompt], 29, attend)
    following = place(model, prompt).next_position
    for i, token in enumerate(tail):
        axes = torch.full((3, 1), following + i)
        outputs.append(model.logits(model(model.embed(torch.tensor([token])), axes, attend.step([(0, 1)]))))
    torch.testing.assert_close(torch.cat(outputs), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_fbgemm)])
@pytest.mark.parametrize("dtype", BOUNDS)
@torch.inference_mode()
def test_narrow_dtypes_stay_near(dtype, packed, checkpoint, oracle, prompts, monkeypatch):
    if packed:
        monkeypatch.setattr(avx2, "is_this_cpu", lambda: True)
        monkeypatch.setattr(avx2, "LEAST_PACKED", 1)
    model = load(checkpoint.path, dtype)
    assert any(isinstance(module, avx2.HalfMatrix) for module in model.modules()) is packed
    assert {p.dtype for p in model.parameters() if p.ndim > 1} == {dtype}
    assert model.decoder.rope.frequencies.dtype == model.visual.inv_freq.dtype == torch.float32
    for name, prompt in prompts.items():
        exact = oracle(checkpoint.oracle, prompt)
        error = narrow_error(reference_logits(model, [in_dtype(prompt, dtype)])[0], exact, checkpoint.config)
        assert error < BOUNDS[dtype] * exact.abs().max(), name


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
