"""The model against transformers, float32 at 1e-5, one rank."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_engine.matmul import in_float32
from mini_engine.model.architectures import canonical_name
from mini_engine.model.layers import pack_later
from tests.support import script, tiny
from tests.support.checkpoints import load
from tests.support.families import FAMILIES

pytestmark = pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="session")
needs_fbgemm = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="not on x86")
NAMES = ["text", "image", "video", *tiny.ORDERS]
BFLOAT16_BOUND = 0.05  # of the largest logit


@pytest.mark.parametrize("budget", [1 << 30, 29])
def test_logits_of_a_mixed_batch_equal_transformers(budget, model, checkpoint, family):
    """Of prompts at once, or in chunks that end inside of items, and of three tokens decoded after each.

    The first video outlasts the text behind it; what is decoded stands where it would as part of the prompt.
    """
    tiny.assert_logits(script.logits(model, family, NAMES, budget, count=4), checkpoint.oracle, family)


@pytest.mark.parametrize("layout", ["old", "new", "sharded"])
def test_every_checkpoint_layout_of_the_hub_gives_the_same(layout, checkpoint, family, tmp_path):
    if layout == "sharded":
        checkpoint.oracle.save_pretrained(tmp_path, max_shard_size="100KB")
    else:
        config = json.loads((checkpoint.path / "config.json").read_text())
        stored = load_file(checkpoint.path / "model.safetensors")
        tensors = {canonical_name(name): tensor for name, tensor in stored.items()}
        if layout == "old":
            text, vision = config.pop("text_config"), config["vision_config"]
            config = {"torch_dtype": config.pop("dtype")} | text | config
            rope = config.pop("rope_parameters")
            config["rope_theta"] = rope["rope_theta"]
            config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
            vision["in_chans"] = vision.pop("in_channels")
            vision.pop("rope_parameters", None)
            for name in list(tensors):
                old_name = name.replace("model.language_model", "model").replace("model.visual", "visual")
                tensors[old_name] = tensors.pop(name)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert model.config == checkpoint.config
    tiny.assert_logits(script.logits(model, family, ["image then video"]), checkpoint.oracle, family)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_fbgemm)])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.bfloat16, BFLOAT16_BOUND), (torch.float16, BFLOAT16_BOUND / 8)],  # three more bits
)
def test_narrow_dtypes_stay_near(dtype, bound, packed, checkpoint, family, monkeypatch):
    if packed:
        monkeypatch.setattr(in_float32, "is_x86_without_bfloat16", lambda: True)
        monkeypatch.setattr("mini_engine.matmul.linear.LEAST_PACKED", 1)
    model = load(checkpoint.path, dtype)
    list(pack_later(model))
    assert any(isinstance(module, in_float32.HalfMatrix) for module in model.modules()) is packed
    assert {p.dtype for p in model.parameters() if p.ndim > 1} == {dtype}
    assert model.decoder.rope.frequencies.dtype == model.visual.inv_freq.dtype == torch.float32
    found = script.logits(model, family, NAMES)
    for name, exact in tiny.logits(checkpoint.oracle, family, found).items():
        errors = (found[name].float() - exact).abs().amax(1)
        # Rounding lets some tokens choose other experts.
        error = errors.median() if checkpoint.config.text.experts else errors.max()
        assert error < bound * exact.abs().max(), name


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
