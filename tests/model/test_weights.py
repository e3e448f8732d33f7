"""Loading: what does not fit is named before anything is read; a rank reads its part."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText

from mini_engine.matmul.in_float32 import HalfMatrix, can_pack
from mini_engine.matmul.quantized import Int8Matrix
from mini_engine.model import layers, weights
from mini_engine.model.architectures import canonical_name
from mini_engine.model.checkpoint import PROGRESS_LINES, PROGRESS_SECONDS, CheckpointError, Progress
from mini_engine.model.layers import pack_later, weight_slices_of
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.quantized_files import find_weights
from tests.model.conftest import values_of
from tests.model.test_experts import by_expert
from tests.support import script, tiny
from tests.support.checkpoints import load
from tests.support.families import FAMILIES

FILE = "model.safetensors"


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


def test_a_model_that_memory_cannot_hold_is_refused(copy):
    raw = json.loads((copy / "config.json").read_text())
    raw["text_config"] |= {"intermediate_size": 1 << 21, "num_hidden_layers": 400}
    (copy / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        CheckpointError, match=r"take [\d.]+ GiB of a worker .* GiB of memory are free; choose a smaller"
    ):
        load(copy, load_format="dummy")


def test_a_stored_copy_of_a_tied_head_frequencies_and_layers_for_speculation_are_ignored(copy):
    rewrite(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    rewrite(
        copy, lambda t: t.update({"visual.rotary_pos_emb.inv_freq": torch.zeros(2), "mtp.fc.weight": torch.ones(2)})
    )
    for rank in range(2):
        model = load(copy, torch.float32, TensorParallel(rank, 2))
        assert model.head is model.embedding


def test_a_tied_head_that_is_stored_with_other_values_is_refused_with_the_remedy(copy, family):
    """transformers does not tie then, whatever the config says. The rank that holds the row finds out."""

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][150] += 0.1

    rewrite(copy, change)
    theirs = AutoModelForImageTextToText.from_pretrained(copy, dtype=torch.float32).eval()
    assert not torch.equal(theirs.lm_head.weight, theirs.get_input_embeddings().weight)
    said = "lm_head.weight in .* differs from model.language_model.embed_tokens.weight, which its config.json ties it "
    with pytest.raises(CheckpointError, match=said + "to; set tie_word_embeddings to false there to use both"):
        load(copy)
    with pytest.raises(CheckpointError, match=said):
        load(copy, tp=TensorParallel(1, 2))
    raw = json.loads((copy / "config.json").read_text())
    raw["tie_word_embeddings"] = raw["text_config"]["tie_word_embeddings"] = False
    (copy / "config.json").write_text(json.dumps(raw))
    tiny.assert_logits(script.logits(load(copy), family, ["text"]), theirs, family)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: os.truncate(file, file.stat().st_size // 2), "has become shorter while it was read; download it"),
        (Path.unlink, r"cannot be read \(No such file or directory\); check its permissions and its disk"),
    ],
)
def test_an_error_in_a_reading_thread_is_named_and_leaves_the_number_of_threads(damage, message, copy, monkeypatch):
    """The file is damaged once its header is read."""

    def find_and_damage(*args):
        found = find_weights(*args)
        damage(copy / FILE)
        return found

    numbers = list[int]()
    monkeypatch.setattr(weights, "find_weights", find_and_damage)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(copy / FILE))} {message}"):
        load(copy)
    assert numbers.pop() == 3 and set(numbers) == {1}


def test_no_weights_at_all(copy):
    (copy / FILE).unlink()
    with pytest.raises(CheckpointError, match="has no safetensors files, and no others are read; download them"):
        load(copy)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [family + which for family in FAMILIES for which in ("", " untied")])
def test_ranks_hold_every_weight_once(name, size, checkpoints):
    """No process group: the parts of all ranks, put back together, are the checkpoint, and all but the little that each
    rank needs is on one rank alone, or on as many as share a key-value head."""
    checkpoint = checkpoints(name)
    stored = {canonical_name(key): value for key, value in by_expert(load_file(checkpoint.path / FILE)).items()}
    holders = {key: torch.zeros(value.shape, dtype=torch.int64) for key, value in stored.items()}
    for rank in range(size):
        model = load(checkpoint.path, tp=TensorParallel(rank, size))
        for piece in weight_slices_of(model):
            holders[piece.source][piece.index] += 1
            assert torch.equal(piece.target, stored[piece.source][piece.index])
        # Nothing is held beside: the pieces are all that the parameters are.
        held = sum(piece.target.numel() for piece in weight_slices_of(model))
        assert held == sum(p.numel() for p in model.parameters())
    # What every rank holds whole, beside norms, and biases of sums over the ranks.
    whole = re.compile(r"visual\.(patch_embed\.proj|pos_embed)\.weight$|mlp\.(gate|shared_expert_gate)\.weight$")
    split = re.compile(r"(q_proj|k_proj|v_proj|qkv|gate_proj|up_proj|fc1|merger\.mlp\.0)\.bias$|A_log$|dt_bias$")
    for key, counts in holders.items():
        is_whole = whole.search(key) or (counts.ndim == 1 and not split.search(key))
        is_kv = "k_proj" in key or "v_proj" in key
        once = max(1, size // checkpoint.config.text.num_kv_heads) if is_kv else 1
        assert counts.unique().tolist() == [size if is_whole else once], key


def test_quantised_weights_are_named(copy):
    rewrite(copy, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="not floating point: model.language_model.norm.weight is I8"):
        load(copy)


def test_random_weights_are_random(checkpoint):
    tensors = values_of(load(checkpoint.path, torch.bfloat16, load_format="dummy"))
    matrices = {name: tensor.flatten(1) for name, tensor in tensors.items() if tensor.ndim > 1}
    for name, matrix in matrices.items():
        assert matrix.std().item() == pytest.approx(0.02, rel=0.1), name
        assert abs(matrix.mean().item()) < 0.002, name
        assert torch.linalg.matrix_rank(matrix) == min(matrix.shape), name
    assert len({matrix.sum().item() for matrix in matrices.values()}) == len(matrices)


def test_runs_of_rows_and_ranks_make_and_read_the_same_weights(copy, monkeypatch):
    whole = values_of(load(copy, load_format="dummy"))
    save_file(whole, copy / FILE)
    monkeypatch.setattr(weights, "RUN_VALUES", 250)
    for load_format in ("dummy", "auto"):
        for name, tensor in values_of(load(copy, load_format=load_format)).items():
            assert torch.equal(tensor, whole[name])
    for rank, load_format in ((0, "auto"), (1, "auto"), (0, "dummy"), (1, "dummy")):
        for piece in weight_slices_of(load(copy, tp=TensorParallel(rank, 2), load_format=load_format)):
            assert torch.equal(piece.target, whole[piece.source][piece.index])


@pytest.mark.parametrize(("load_format", "what"), [("auto", "weights read"), ("dummy", "random weights made")])
def test_progress_is_logged_with_an_estimate(load_format, what, checkpoint, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("mini_engine.model.checkpoint.PROGRESS_SECONDS", 0)
    load(checkpoint.path, load_format=load_format)
    ends = [line for line in caplog.messages if re.fullmatch(r"[a-z ]+: \d+\.\d\d GB in \d+\.\d s", line)]
    assert [end.partition(":")[0] for end in ends] == [what] and caplog.messages[-1] == ends[-1]
    under_way = what + r": \d+\.\d\d of \d+\.\d\d GB, about \d+ s left"
    assert sum(bool(re.fullmatch(under_way, line)) for line in caplog.messages) > 3


def test_estimate_is_at_the_rate_of_the_last_lines(monkeypatch, caplog):
    """Ten times as fast at first, then in bursts: 1 and 19 GB by turns."""
    caplog.set_level("INFO")
    seconds = itertools.count(0.0, PROGRESS_SECONDS)
    monkeypatch.setattr("mini_engine.model.checkpoint.time.monotonic", lambda: next(seconds))
    progress = Progress("weights read", 1000 * 10**9)
    sizes = [100, 100, *[1, 19] * 8]
    for size in sizes:
        progress.add(size * 10**9)
    done = list(itertools.accumulate(sizes))[PROGRESS_LINES + 1 :]
    assert [line.rpartition(", ")[2] for line in caplog.messages[PROGRESS_LINES + 1 :]] == [
        f"about {(1000 - size) / 10 * PROGRESS_SECONDS:.0f} s left" for size in done
    ]


@pytest.mark.skipif(not can_pack(), reason="not on x86")
@pytest.mark.parametrize(("has_vnni", "decoder", "says"), [(True, 16, True), (False, 16, False), (True, 8, False)])
def test_log_says_why_weights_are_packed_and_whether_int8_is_faster(has_vnni, decoder, says, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(layers, "has_vnni", lambda: has_vnni)
    quantised = Int8Matrix(4, 32, torch.device("cpu")) if decoder == 8 else nn.Identity()
    list(pack_later(nn.ModuleList([HalfMatrix(torch.ones(64, 32).bfloat16()), quantised])))
    first = caplog.messages[0]
    assert first.startswith("this CPU has no instructions for bfloat16: packing weights between steps")
    assert ("--quantization int8 is faster here" in first) is says
    caplog.clear()
    list(pack_later(nn.ModuleList([quantised])))
    assert not caplog.messages, "nothing to pack"


@pytest.mark.skipif(not can_pack(), reason="not on x86")
@pytest.mark.parametrize("threads", [1, 3, 7])
def test_memory_of_packed_weights_is_returned_on_the_way(threads, monkeypatch, caplog):
    """With any number of threads, each of which packs a part at a time."""
    caplog.set_level("INFO")
    model, returned = nn.ModuleList(HalfMatrix(torch.ones(64, 32).bfloat16()) for _ in range(42)), list[str]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(layers, "TRIM_BYTES", 10 * 64 * 32 * 2)
    monkeypatch.setattr(layers, "return_freed_memory", lambda: returned.append("all"))
    for turns, _ in enumerate(pack_later(model), 1):
        assert len(returned) == turns // -(-10 // threads)
    assert turns == 42 // threads and len(returned) == 1 + turns // -(-10 // threads), "and at the end"
    assert "weights packed: 0.00 GB" in caplog.text
