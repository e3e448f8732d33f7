"""What the supervisor finds out about a model before it starts a process."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.host import check_model_files, load_model_config, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put_in_cache(cache: Path, name: str, revision: str = "main") -> Path:
    """The bundled model as the hub's cache holds a download."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / revision).write_text(COMMIT)
    return Path(shutil.copytree(BUNDLED_MODEL, folder / "snapshots" / COMMIT))


def check(directory: Path | str, **settings: object) -> None:
    config = EngineConfig(**settings)
    check_model_files(str(directory), load_model_config(str(directory), config), config)


def test_a_hub_name_is_found_in_the_cache_without_a_network(offline):
    snapshot = put_in_cache(offline, "someone/some-model")
    assert resolve_model(EngineConfig(model="someone/some-model")) == str(snapshot)
    check(snapshot)


def test_the_revision_is_the_one_asked_for(offline):
    snapshot = put_in_cache(offline, "someone/some-model", "v2")
    assert resolve_model(EngineConfig(model="someone/some-model", revision="v2")) == str(snapshot)
    with pytest.raises(ConfigError, match="not in the hub's cache"):
        resolve_model(EngineConfig(model="someone/some-model"))


def test_a_hub_name_that_is_not_in_the_cache(offline):
    with pytest.raises(ConfigError) as error:
        resolve_model(EngineConfig(model="someone/other-model"))
    assert str(error.value) == (
        f"'someone/other-model' is no directory, and not in the hub's cache, {offline}; "
        "unset HF_HUB_OFFLINE to download it, or set HF_HOME to where it is"
    )


def test_no_weights_are_downloaded_for_dummy_ones(monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **more: asked.append(more["allow_patterns"]) or "/there"
    )
    for load_format in ("auto", "dummy"):
        assert resolve_model(EngineConfig(model="someone/some-model", load_format=load_format)) == "/there"
    with_weights, without = asked
    assert set(with_weights) - set(without) == {"*.safetensors"}


@pytest.mark.parametrize("model", ["/no/such/place", "./nowhere", "~/nowhere"])
def test_a_path_that_is_no_directory(model):
    with pytest.raises(ConfigError, match=f"{model} is not a directory"):
        resolve_model(EngineConfig(model=model))


def test_damaged_weights_are_found_unless_they_are_not_read(tmp_path):
    shutil.copytree(BUNDLED_MODEL, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(ConfigError, match=r"model.safetensors is cut short .* download it again"):
        check(tmp_path)
    weights.unlink()
    with pytest.raises(ConfigError, match="has no safetensors files"):
        check(tmp_path)
    check(tmp_path, load_format="dummy")


@pytest.mark.parametrize("name", ["tokenizer.json", "preprocessor_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "[]", '"a"', "{} x", '{"a": ', "[" * 100_000])
def test_a_damaged_json_file_is_named(name, text, tmp_path):
    shutil.copytree(BUNDLED_MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"/{name} is not a JSON object that can be read: .*; copy it from where"):
        check(tmp_path)


@pytest.mark.parametrize("text", ["", '{"a": 1} x', "[" * 100_000])
def test_a_damaged_config_is_named_with_the_remedy(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be served: .*; mend its config.json, or copy it"):
        load_model_config(str(tmp_path), EngineConfig())


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("tokenizer.json", "has no tokenizer: neither tokenizer.json nor vocab.json; copy"),
        ("preprocessor_config.json", "has no processor: neither preprocessor_config.json nor processor_config.json; c"),
    ],
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_other_files_are_needed_too(missing, said, load_format, tmp_path):
    shutil.copytree(BUNDLED_MODEL, tmp_path, dirs_exist_ok=True)
    check(tmp_path, load_format=load_format)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=said):
        check(tmp_path, load_format=load_format)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "vision_heads", "ranks", "message"),
    [
        (4, 2, 4, 4, None),
        (4, 2, 4, 3, "4 attention heads cannot be shared evenly by 3"),
        (
            6,
            6,
            4,
            3,
            "4 vision attention heads cannot be shared evenly by 3 .* or --mm-encoder-tp-mode data",
        ),
        (12, 3, 4, 2, "3 key-value heads can be neither split nor repeated evenly over 2 workers; choose a divisor"),
    ],
)
def test_heads_must_divide(heads, kv_heads, vision_heads, ranks, message, tmp_path):
    raw = json.loads((Path(BUNDLED_MODEL) / "config.json").read_text())
    raw["text_config"] |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 32}
    raw["vision_config"]["num_heads"] = vision_heads
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = EngineConfig(tensor_parallel_size=ranks)
    if message is None:
        load_model_config(str(tmp_path), config)
        return
    with pytest.raises(ConfigError, match=message):
        load_model_config(str(tmp_path), config)
    whole_tower = dataclasses.replace(config, mm_encoder_tp_mode="data")
    if "vision" in message:
        assert "or --mm-encoder-tp-mode data" in message
        load_model_config(str(tmp_path), whole_tower)
    else:
        with pytest.raises(ConfigError, match=message):
            load_model_config(str(tmp_path), whole_tower)
