"""The start-up checks: the model's files, the media cache, settings without effect, the runtime directory."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from mini_engine import host
from mini_engine.cli import settle
from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.core.media_store import media_directory
from mini_engine.host import check_model_files, load_model_config, resolve_model, runtime_directory, without_effect
from mini_engine.messages import CachedMedia, Init, MediaCachePlan
from tests.e2e.running_server import ROOT, descendants
from tests.e2e.waiting import eventually

# --- the model's files ------------------------------------------------------------------------------------------------

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
    snapshot = put_in_cache(offline, "some/model", "v2")
    assert resolve_model(EngineConfig(model="some/model", revision="v2")) == str(snapshot)
    check(snapshot)
    with pytest.raises(ConfigError) as error:
        resolve_model(EngineConfig(model="some/model"))  # another revision
    assert str(error.value) == (
        f"'some/model' is no directory, and not in the hub's cache, {offline}; "
        "unset HF_HUB_OFFLINE to download it, or set HF_HOME to where it is"
    )


def test_no_weights_are_downloaded_for_dummy_ones(monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **more: asked.append(more["allow_patterns"]) or "/there"
    )
    for load_format in ("auto", "dummy"):
        assert resolve_model(EngineConfig(model="some/model", load_format=load_format)) == "/there"
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


def test_a_damaged_or_missing_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path} has no config.json; give the directory"):
        load_model_config(str(tmp_path), EngineConfig())
    (tmp_path / "config.json").write_text('{"a": 1} x')
    with pytest.raises(ConfigError, match=f"the model in {tmp_path} cannot be served: .*Extra data"):
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
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=said):
        check(tmp_path, load_format=load_format)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "vision_heads", "ranks", "message"),
    [
        (4, 2, 4, 4, None),
        (4, 2, 4, 3, "4 attention heads cannot be shared evenly by 3"),
        (6, 6, 4, 3, "4 vision attention heads cannot be shared evenly by 3 .* or --mm-encoder-tp-mode data"),
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
    if "vision" in message:
        load_model_config(str(tmp_path), dataclasses.replace(config, mm_encoder_tp_mode="data"))


def test_a_length_beyond_the_models_own(tmp_path: Path) -> None:
    raw = json.loads((Path(BUNDLED_MODEL) / "config.json").read_text())
    raw["text_config"]["max_position_embeddings"] = 1000
    (tmp_path / "config.json").write_text(json.dumps(raw))
    load_model_config(str(tmp_path), EngineConfig(max_model_len=1000))
    with pytest.raises(ConfigError, match="--max-model-len: the model was made for 1000 tokens, not 1001"):
        load_model_config(str(tmp_path), EngineConfig(max_model_len=1001))


# --- the media cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [("shm", {"data_parallel_size": 3}), ("lru", {"tensor_parallel_size": 1})])
def test_a_cache_that_passes_the_plan_can_be_started(kind, count) -> None:
    smallest, holders = host.SMALLEST_MEDIA_CACHE / (1 << 30), count.get("data_parallel_size", 1)
    config = EngineConfig(mm_processor_cache_type=kind, mm_processor_cache_gb=holders * smallest, **count)
    plan = host.plan_media_cache(config)
    assert plan.kind == kind and plan.nbytes == host.SMALLEST_MEDIA_CACHE
    media = media_directory(Init(config, "", "", [], [], [], plan), 1024, "cpu")
    facts = CachedMedia(bytes(16), "image", 1, (1, 1, 1), None)
    assert kind == "lru" or media.reserve((1, "r"), facts).outcome == "reserved"
    too_small = EngineConfig(mm_processor_cache_type=kind, mm_processor_cache_gb=holders * 0.9 * smallest, **count)
    with pytest.raises(ConfigError, match="--mm-processor-cache-gb: .* too few, each needs 262144; raise it"):
        host.plan_media_cache(too_small)


# --- settings without effect ------------------------------------------------------------------------------------------

SHM, OFF = MediaCachePlan("shm", 1 << 30, ""), MediaCachePlan("off", 0, "")
WORKERS = ["--mm-encoder-tp-mode", "data", "--distributed-backend", "gloo"]
SIZES = ["--kv-cache-memory-bytes", "1G", "--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "9"]


@pytest.mark.parametrize(
    ("argv", "cache", "device", "expected"),
    [
        ([], SHM, "cpu", ""),
        ([], OFF, "cpu", ""),
        ([], SHM, "cuda", ""),
        (["--gpu-memory-utilization", "0.9"], SHM, "cpu", "--gpu-memory-utilization (the workers run on the CPU)"),
        (["--no-enforce-eager"], SHM, "cpu", "--enforce-eager (CUDA graphs need CUDA)"),
        (["--no-enforce-eager"], SHM, "cuda", ""),
        (["--limit-mm-per-prompt", '{"image": {"count": 4}}'], SHM, "cpu", ""),
        (["--limit-mm-per-prompt", '{"image": {"count": 4, "width": 512}}'], SHM, "cpu",
         "--limit-mm-per-prompt (sizes beside a count change nothing)"),
        (WORKERS, SHM, "cpu",
         "--mm-encoder-tp-mode (an engine has one worker); --distributed-backend (an engine has one worker)"),
        ([*WORKERS, "-tp", "2"], SHM, "cpu", ""),
        # On CUDA the backend lets the workers of several engines share a device.
        ([*WORKERS, "-dp", "2"], SHM, "cuda", "--mm-encoder-tp-mode (an engine has one worker)"),
        (SIZES, SHM, "cuda", "--gpu-memory-utilization (--kv-cache-memory-bytes goes before it); "
         "--kv-cache-memory-bytes (--num-gpu-blocks-override goes before it)"),
        (["--mm-processor-cache-type", "shm", "--mm-shm-cache-max-object-size-mb", "3"], OFF, "cpu",
         "--mm-processor-cache-type (the cache is off); --mm-shm-cache-max-object-size-mb (no cache in shared memory)"),
        ([BUNDLED_MODEL, "--revision", "main"], SHM, "cpu", "--revision (MODEL is a directory)"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_named(argv, cache, device, expected) -> None:
    settings = settle(argv, {})
    assert "; ".join(without_effect(settings.config, settings.origins, cache, device)) == expected


def test_a_default_in_a_file_is_not_named(tmp_path: Path) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_text("enforce-eager: false\ngpu-memory-utilization: 0.9\n")  # as --print-config writes it
    settings = settle(["--config", str(path)], {})
    assert not without_effect(settings.config, settings.origins, SHM, "cpu")


# --- the runtime directory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["/proc", "/nowhere"])
def test_no_room_for_a_directory_is_said_in_one_line(base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", base)
    with pytest.raises(ConfigError, match=f"^no room for a directory in {base} .*: set TMPDIR"), runtime_directory():
        pass


def test_a_directory_outlives_neither_its_process_nor_a_signal_to_all(tmp_path: Path) -> None:
    """As when a service manager stops its unit, and then kills what has not stopped."""
    code = "import sys; from mini_engine.host import *\nwith runtime_directory(Path(sys.argv[1])): input()"
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def janitor() -> int:
        (found,) = descendants(held.pid) or [0]
        ignored = int(re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{found or held.pid}/status").read_text())[0], 16)
        assert found and all(ignored & 1 << number - 1 for number in numbers)
        return found

    def assert_gone() -> None:
        assert not list(tmp_path.iterdir())

    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE) as held:
        found = eventually(janitor)
        for number in numbers:
            subprocess.run(["kill", f"-{int(number)}", str(found)], check=True)
        assert len(list(tmp_path.iterdir())) == 1
        held.kill()
    eventually(assert_gone)
