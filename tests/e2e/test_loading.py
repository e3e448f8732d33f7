"""Starting `serve.py` with checkpoints of all kinds: it answers, or says in one line why it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_engine.config import BUNDLED_MODEL
from mini_engine.model.registry import SPECS
from tests.e2e.asked import ask_two, ask_video
from tests.e2e.running_server import RunningServer
from tests.e2e.test_scarcity import refused
from tests.test_host import put_in_cache


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))


def answers_right(server: RunningServer) -> bool:
    asked = [ask_video(seed) for seed in range(6)] + [ask_two(seed) for seed in range(2)]
    return [server.ask(one.text, one.urls) for one in asked] == [one.answer for one in asked]


@pytest.mark.slow
def test_a_hub_name_from_the_cache_in_bfloat16_by_two_workers(tmp_path):
    put_in_cache(tmp_path, "someone/some-model")
    environ = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    with RunningServer("someone/some-model", "--dtype", "bfloat16", "-tp", "2", environ=environ) as server:
        assert server.model == "someone/some-model"
        assert "model loaded: bfloat16" in server.log
        assert answers_right(server)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--dtype", "half"),
        ("--dtype", "half", "-tp", "2"),
        ("--dtype", "bfloat16"),
        ("--mm-encoder-tp-mode", "data", "-tp", "2"),
        ("--mm-encoder-tp-mode", "data", "-tp", "4", "--dtype", "bfloat16"),
    ],
)
def test_number_formats_and_whole_towers(flags):
    with RunningServer(*flags) as server:
        assert answers_right(server)


@pytest.mark.slow
def test_a_model_without_weights(model):
    (model / "model.safetensors").unlink()
    asked = ask_video(1)
    with RunningServer(str(model), "--load-format", "dummy", "-tp", "2") as server:
        alike = [server.ask(asked.text, asked.urls, max_tokens=8) for _ in range(2)]
    with RunningServer(str(model), "--load-format", "dummy") as server:
        assert [server.ask(asked.text, asked.urls, max_tokens=8) for _ in range(2)] == alike


def test_weights_that_do_not_fit_are_named_in_one_line(model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.language_model.norm.weight"]
    tensors["model.language_model.more.weight"] = torch.zeros(1)
    save_file(tensors, model / "model.safetensors")
    said = refused(str(model), "-tp", "2")
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "model.language_model" in line]
    assert f"start failed: the weights in {model} do not fit its config.json; " in line
    assert "missing: model.language_model.norm.weight; unexpected: model.language_model.more.weight" in line
    assert not [line for line in said.splitlines() if "died" in line]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_without_a_device_is_refused_in_one_line():
    said = refused("--distributed-backend", "nccl", "-tp", "2")
    (line,) = [line for line in said.splitlines() if "ERROR" in line]
    assert "start failed: --distributed-backend: nccl needs CUDA devices, and there is none here" in line
    assert "Traceback" not in said


def test_an_unknown_architecture_is_refused_with_those_that_are_known(model):
    raw = json.loads((model / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(raw))
    assert refused(str(model)) == (
        f"serve.py: the model in {model} cannot be served: unsupported architecture: LlamaForCausalLM; supported: "
        f"{', '.join(SPECS)}\n"
    )


@pytest.mark.slow
def test_a_tied_head_with_other_values_is_found_by_the_worker_that_holds_it(model):
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, model / "model.safetensors")
    said = refused(str(model), "-tp", "2")
    (line,) = [line for line in said.splitlines() if "ERROR" in line]
    assert f"start failed: lm_head.weight in {model} differs from model.language_model.embed_tokens.weight" in line
    assert "Traceback" not in said


def test_a_damaged_file_is_found_before_anything_starts(model):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    said = refused(str(model))
    assert said.startswith(f"serve.py: {weights} is cut short or no safetensors file (") and said.count("\n") == 1


def test_a_hub_name_that_cannot_be_had(tmp_path):
    said = refused("someone/some-model", environ={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)})
    first, last = said.splitlines()
    assert "someone/some-model is not a directory: loading it from the hub" in first
    assert last.startswith("serve.py: 'someone/some-model' is neither a directory nor in the hub's cache, ")
