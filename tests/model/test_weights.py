"""Loading: what does not fit is named before anything is read; a rank reads its part."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_engine.model import weights
from mini_engine.model.checkpoint import CheckpointError
from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import pieces_of
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.registry import canonical_name
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model, load_weights, parameter_report
from tests.model.families import FAMILIES
from tests.model.made import whole_tensors, write_config

CPU = torch.device("cpu")
FILE = "model.safetensors"


def load(path: Path) -> VisionLanguageModel:
    return load_model(path, TensorParallel(), None, CPU)


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint.path, tmp_path / "copy"))


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)


def test_missing_unexpected_and_misshaped_are_all_named(copy):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.9.extra"] = torch.zeros(1)
        tensors["visual.merger.ln_q.weight"] = torch.zeros(7)

    rewrite(copy, change)
    with pytest.raises(ValueError) as error:
        load(copy)
    assert "missing: model.language_model.norm.weight;" in str(error.value)
    assert "unexpected: model.language_model.layers.9.extra;" in str(error.value)
    assert "wrong shape: model.visual.merger.ln_q.weight is (7,), not (32,)" in str(error.value)


def test_a_long_list_is_cut(copy):
    rewrite(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if "blocks" in name])
    with pytest.raises(ValueError, match=r"missing: .* and 28 more; take all files"):
        load(copy)


def test_a_stored_copy_of_a_tied_head_and_stored_frequencies_are_no_surprise(copy):
    rewrite(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    rewrite(copy, lambda t: t.update({"visual.rotary_pos_emb.inv_freq": torch.zeros(2)}))
    model = load(copy)
    assert model.head is model.embedding


def test_an_untied_head_must_be_there(untied, tmp_path):
    path = Path(shutil.copytree(untied.path, tmp_path / "copy"))
    rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="missing: lm_head.weight; take"):
        load(path)


def test_no_weights_at_all(copy):
    (copy / FILE).unlink()
    with pytest.raises(CheckpointError, match="has no safetensors files, and no others are read; download them"):
        load(copy)


def test_an_index_is_followed(layouts):
    index = json.loads((layouts["sharded"] / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert not (layouts["sharded"] / FILE).exists()
    load(layouts["sharded"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted(dtype, checkpoint):
    model = load_model(checkpoint.path, TensorParallel(), dtype, CPU)
    stored = load_file(checkpoint.path / FILE)["model.embed_tokens.weight"]
    assert torch.equal(model.embedding.weight, stored.to(dtype))


def test_names_of_both_layouts():
    names = {
        "model.layers.0.mlp.up_proj.weight": "model.language_model.layers.0.mlp.up_proj.weight",
        "visual.patch_embed.proj.weight": "model.visual.patch_embed.proj.weight",
        "model.embed_tokens.weight": "model.language_model.embed_tokens.weight",
    }
    for old, new in names.items():
        assert canonical_name(old) == canonical_name(new) == new
    assert canonical_name("lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [family + which for family in FAMILIES for which in ("", " untied")])
def test_ranks_hold_every_weight_once_and_list_the_rest(name, size, checkpoints):
    """No process group: the parts of all ranks, put back together, are the checkpoint; each rank read only its own."""
    path = checkpoints[name].path
    config = ModelConfig.from_dir(path)
    stored = {canonical_name(key): value for key, value in load_file(path / FILE).items()}
    ranks, reads = [], []
    for rank in range(size):
        model = VisionLanguageModel(config, Placement(TensorParallel(rank, size), torch.float32, CPU))
        reads.append(load_weights(model, path, canonical_name))
        ranks.append(model)
    reports = [parameter_report(model) for model in ranks]
    assert sum(report.sharded for report in reports) == reports[0].sharded_total
    for model, report, read in zip(ranks, reports, reads, strict=True):
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        assert held == read == report.sharded + sum(report.replicated.values())
        # Where the vocabulary does not divide, a rank holds at most one row more than its share, of table and of head.
        spare = 2 * config.text.hidden_size * 4 * bool(config.text.vocab_size % size)
        assert report.sharded <= report.sharded_total / size + spare
        kv = [n for n in report.replicated if "k_proj" in n or "v_proj" in n]
        assert bool(kv) == (size > config.text.num_kv_heads)
        norms_and_biases = {n for n in set(report.replicated) - set(kv) if stored[n].ndim == 1}
        assert set(report.replicated) - set(kv) - norms_and_biases <= {
            "model.visual.patch_embed.proj.weight",
            "model.visual.pos_embed.weight",
        }


def test_heads_that_do_not_divide_are_refused(checkpoint, untied):
    for size, message in ((3, "4 vision attention heads cannot be split over 3"), (8, "over 8")):
        with pytest.raises(ValueError, match=message):
            VisionLanguageModel(checkpoint.config, Placement(TensorParallel(0, size), torch.float32, CPU))
    with pytest.raises(
        ValueError, match="3 attention key-value heads can be neither split nor replicated evenly over 2"
    ):
        TensorParallel(0, 2).check_heads("attention", 6, 3)
    with pytest.raises(ValueError, match="rank 2 is not in a group of 2"):
        TensorParallel(2, 2)


def test_quantised_weights_are_named(copy):
    rewrite(copy, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="not floating point: model.language_model.norm.weight is I8"):
        load(copy)


@pytest.mark.parametrize(("stored", "served"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_what_is_stored_in_another_format_is_converted(stored, served, copy):
    rewrite(copy, lambda t: t.update({name: tensor.to(stored) for name, tensor in t.items()}))
    model = load_model(copy, TensorParallel(), served, CPU)
    assert {p.dtype for p in model.parameters()} == {served}
    assert model.decoder.rope.inv_freq.dtype == model.visual.inv_freq.dtype == torch.float32
    for name, tensor in whole_tensors(model).items():
        same = {canonical_name(key): value for key, value in load_file(copy / FILE).items()}[name]
        assert torch.equal(tensor, same.to(served))


@pytest.mark.parametrize("size", [2, 4])
def test_random_weights_are_the_same_model_on_any_number_of_ranks(size, untied):
    whole = whole_tensors(load_model(untied.path, TensorParallel(), None, CPU, "dummy"))
    for rank in range(size):
        for piece in pieces_of(load_model(untied.path, TensorParallel(rank, size), None, CPU, "dummy")):
            assert torch.equal(piece.target, whole[piece.source][piece.index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights_are_random(dtype, tmp_path):
    write_config(tmp_path)
    tensors = whole_tensors(load_model(tmp_path, TensorParallel(), dtype, CPU, "dummy"))
    matrices = {name: tensor.float().flatten(1) for name, tensor in tensors.items() if tensor.ndim > 1}
    for name, matrix in matrices.items():
        assert matrix.std().item() == pytest.approx(0.02, rel=0.1), name
        assert abs(matrix.mean().item()) < 0.002, name
        assert torch.linalg.matrix_rank(matrix) == min(matrix.shape), name
    assert len({matrix.sum().item() for matrix in matrices.values()}) == len(matrices)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            assert tensor.float().mean().item() == pytest.approx(float(name.endswith("weight")), abs=0.02), name
            assert len(tensor.unique()) > 8


def test_a_tensor_of_many_rows_is_filled_in_runs(tmp_path, monkeypatch):
    write_config(tmp_path)
    whole = whole_tensors(load_model(tmp_path, TensorParallel(), None, CPU, "dummy"))
    monkeypatch.setattr(weights, "DUMMY_ROWS_BYTES", 1000)
    for name, tensor in whole_tensors(load_model(tmp_path, TensorParallel(), None, CPU, "dummy")).items():
        assert torch.equal(tensor, whole[name])
