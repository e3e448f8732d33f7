"""The model against transformers, float32 at 1e-5, one rank; and that the comparison can fail."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.kernels import ops
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.rope import MRope, PromptPositions, mrope_positions
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model
from tests.model import reference
from tests.model.chunks import chunked_logits, in_dtype, place
from tests.model.families import IMAGE, VIDEO
from tests.model.reference import Prompt, ReferenceAttention, reference_logits

NAMES = ["text", "image", "video", "two videos", "video then images", "image then video"]
EVERY_FAMILY = True
CPU = torch.device("cpu")
BFLOAT16_BOUND = 0.05  # of the largest logit
BOUNDS = {torch.bfloat16: BFLOAT16_BOUND, torch.float16: BFLOAT16_BOUND / 8}  # three more bits of fraction


def load(path: Path, dtype: torch.dtype | None = None) -> VisionLanguageModel:
    return load_model(path, TensorParallel(), dtype, CPU)


@pytest.fixture(scope="module")
def model(checkpoint) -> VisionLanguageModel:
    return load(checkpoint.path)


def difference(model, oracle, checkpoint, prompt: Prompt, theirs: Prompt | None = None) -> float:
    with torch.inference_mode():
        ours = reference_logits(model, [prompt])[0]
    return (ours - oracle(checkpoint.oracle, theirs or prompt)).abs().max().item()


def test_every_family_has_its_turn(family, model, checkpoint):
    """Were a fixture kept from one family to the next, the tests here would compare one family three times."""
    assert model.config == checkpoint.config
    assert checkpoint.oracle.config.model_type == family


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, model, checkpoint, oracle, prompts):
    assert difference(model, oracle, checkpoint, prompts[name]) < 1e-5


@torch.inference_mode()
def test_a_mixed_flat_batch_equals_each_prompt_alone(model, checkpoint, oracle, prompts):
    logits = reference_logits(model, list(prompts.values()))
    for prompt, ours in zip(prompts.values(), logits, strict=True):
        torch.testing.assert_close(ours, oracle(checkpoint.oracle, prompt), atol=1e-5, rtol=0)


def test_every_sum_is_made_by_the_norm_that_reads_it(monkeypatch, model, prompts):
    """Two in each layer: elsewhere than in `add_rms_norm` each would be a kernel of its own."""
    fused, sums = ops.add_rms_norm, []

    def add_rms_norm(*args: Any) -> torch.Tensor:
        sums.append(args)
        return fused(*args)

    monkeypatch.setattr(ops, "add_rms_norm", add_rms_norm)
    with torch.inference_mode():
        reference_logits(model, [prompts["text"]])
    assert len(sums) == 2 * len(model.decoder.layers)


@pytest.mark.parametrize("layout", ["saved", "old", "new", "sharded"])
def test_every_checkpoint_layout_gives_the_same(layout, layouts, checkpoint, oracle, prompts):
    model = load(layouts[layout])
    assert model.config == checkpoint.config
    assert difference(model, oracle, checkpoint, prompts["image then video"]) < 1e-5


def test_untied_head_and_a_single_kv_head(untied, oracle, prompts):
    assert difference(load(untied.path), oracle, untied, prompts["video then images"]) < 1e-5


@pytest.mark.parametrize("name", ["two videos", "video then images", "image then video"])
@torch.inference_mode()
def test_chunked_prefill_and_decode_equal_one_pass(name, model, checkpoint, oracle, prompts):
    """Three tokens decoded at `next_position + i`, after a prefill cut in the middle of an item.

    The first video outlasts the text behind it; what is decoded stands where it would as part of the prompt.
    """
    prompt, tail, attend = prompts[name], [21, 22, 23], ReferenceAttention()
    whole = oracle(checkpoint.oracle, replace(prompt, token_ids=[*prompt.token_ids, *tail]))
    outputs = chunked_logits(model, [prompt], 29, attend)
    following = place(model, prompt).next_position
    for i, token in enumerate(tail):
        axes = torch.full((3, 1), following + i)
        outputs.append(model.logits(model(model.embed(torch.tensor([token])), axes, attend.step([(0, 1)]))))
    torch.testing.assert_close(torch.cat(outputs), whole, atol=1e-5, rtol=0)


def test_zeroed_mrope_is_noticed(monkeypatch, model, checkpoint, oracle, prompts):
    def zeroed(*args):
        return PromptPositions(torch.zeros_like(mrope_positions(*args).positions), 0)

    monkeypatch.setattr(reference, "mrope_positions", zeroed)
    assert difference(model, oracle, checkpoint, prompts["video"]) > 1e-2


def test_swapped_grids_are_noticed(model, checkpoint, oracle, prompts):
    patches, (t, h, w) = prompts["image"].images[0]
    swapped = replace(prompts["image"], images=[(patches, (t, w, h))])
    assert difference(model, oracle, checkpoint, swapped, prompts["image"]) > 1e-2


def test_swapped_items_are_noticed(model, checkpoint, oracle, prompts):
    right = prompts["two videos"]
    first, second = right.videos
    exchanged = (second[0].repeat(3, 1)[: len(first[0])], first[1]), (first[0][: len(second[0])], second[1])
    assert difference(model, oracle, checkpoint, replace(right, videos=exchanged), right) > 1e-2


def test_media_one_position_late_are_noticed(monkeypatch, model, checkpoint, oracle, prompts):
    def late(token_ids, *args):
        placed = mrope_positions(token_ids, *args)
        is_media = torch.tensor([token in (IMAGE, VIDEO) for token in token_ids])
        return PromptPositions(placed.positions + is_media, placed.next_position)

    monkeypatch.setattr(reference, "mrope_positions", late)
    for name in ("image", "video"):
        assert difference(model, oracle, checkpoint, prompts[name]) > 1e-3


def test_the_other_layout_of_the_frequencies_is_noticed(monkeypatch, model, checkpoint, oracle, prompts):
    text = model.config.text
    other = MRope(replace(text, mrope_interleaved=not text.mrope_interleaved), CPU)
    monkeypatch.setattr(model.decoder, "rope", other)
    assert difference(model, oracle, checkpoint, prompts["image"]) > 1e-3


def test_a_tower_without_what_sets_it_apart_is_noticed(family, monkeypatch, model, checkpoint, oracle, prompts):
    """Windows, deeper features or learned positions, left out one at a time."""
    vision, decode = model.config.vision, model.decoder.forward
    changes = {
        "qwen2_vl": [(model.visual, "config", replace(vision, window_size=16))],
        "qwen2_5_vl": [(model.visual, "config", replace(vision, window_size=None))],
        "qwen3_vl": [
            (model.decoder, "forward", lambda hidden, positions, attend, media: decode(hidden, positions, attend)),
            (getattr(model.visual, "positions", None), "forward", lambda where: torch.zeros(1)),
        ],
    }
    for change in changes[family]:
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            assert difference(model, oracle, checkpoint, prompts["video then images"]) > 1e-3
    assert difference(model, oracle, checkpoint, prompts["video then images"]) < 1e-5


@torch.inference_mode()
def relative_errors(model: VisionLanguageModel, oracle, checkpoint, prompts) -> dict[str, float]:
    """By name of the prompt, the largest error of a logit, as a share of the largest logit."""
    dtype, errors = model.embedding.weight.dtype, {}
    for name, prompt in prompts.items():
        exact = oracle(checkpoint.oracle, prompt)
        ours = reference_logits(model, [in_dtype(prompt, dtype)])[0].float()
        errors[name] = ((ours - exact).abs().max() / exact.abs().max()).item()
    return errors


@pytest.mark.parametrize("dtype", BOUNDS)
def test_narrow_dtypes_stay_near(dtype, checkpoint, oracle, prompts):
    model = load(checkpoint.path, dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.decoder.rope.inv_freq.dtype == model.visual.inv_freq.dtype == torch.float32
    errors = relative_errors(model, oracle, checkpoint, prompts)
    assert max(errors.values()) < BOUNDS[dtype], errors


def test_a_wrong_model_is_further_off_than_a_narrow_dtype_may_be(monkeypatch, checkpoint, oracle, prompts):
    """Other windows in the tower, and another base of the rotary frequencies: small mistakes."""
    model = load(checkpoint.path, torch.bfloat16)
    vision, text = model.config.vision, model.config.text
    other = None if vision.window_size else 4 * vision.patch_size
    monkeypatch.setattr(model.visual, "config", replace(vision, window_size=other))
    errors = relative_errors(model, oracle, checkpoint, prompts)
    assert min(error for name, error in errors.items() if name != "text") > BFLOAT16_BOUND, errors
    assert errors["text"] < BFLOAT16_BOUND
    monkeypatch.setattr(model.decoder, "rope", MRope(replace(text, rope_theta=5 * text.rope_theta), CPU))
    assert relative_errors(model, oracle, checkpoint, prompts)["text"] > BFLOAT16_BOUND


def test_patches_that_do_not_fill_the_grids_are_refused(model):
    with pytest.raises(ValueError, match="10 patches do not fill"):
        model.encode_vision(torch.zeros(10, model.config.vision.patch_dim), [(1, 4, 4)])
    with pytest.raises(ValueError, match="does not divide into merged patches"):
        model.encode_vision(torch.zeros(15, model.config.vision.patch_dim), [(1, 3, 5)])
