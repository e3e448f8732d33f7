"""The start-up checks: the host, the model's files, the media cache, settings without effect, the runtime directory."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import huggingface_hub.constants
import pytest

from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.launch.cli import parse
from mini_engine.launch.plan import parallelism, startup_checks
from mini_engine.launch.plan.startup_checks import check_model, resolve_model, without_effect
from mini_engine.launch.runtime_directory import MAX_UNIX_PATH, runtime_directory
from mini_engine.messages import EngineLimits, MediaCachePlan
from tests.support.hub_cache import put_in_cache
from tests.support.web import make_certificate

# --- the host ---------------------------------------------------------------------------------------------------------


def test_what_a_container_may_lack_is_named(tmp_path, monkeypatch):
    def refused() -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    startup_checks.check_host()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(startup_checks, "PROC_FILES", [Path("/nowhere/meminfo"), tmp_path, Path("/proc/cpuinfo")])
    monkeypatch.setitem(startup_checks.SYSTEM_CALLS, "pidfd_open", refused)
    with pytest.raises(ConfigError) as error:
        startup_checks.check_host()
    for line, start in zip(
        str(error.value).splitlines(),
        [
            "/nowhere/meminfo cannot be read (No such file or directory): mount ",
            f"{tmp_path} cannot be read (Is a directory): mount ",
            "the system call pidfd_open fails (Function not implemented): it needs ",
            "the working directory cannot be read (No such file or directory): start ",
        ],
        strict=True,
    ):
        assert line.startswith(start)


# --- the device, and the model's files --------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(BUNDLED_MODEL, tmp_path, dirs_exist_ok=True))


def edit_config(model: Path, vision_heads: int = 4, **text: int) -> None:
    raw = json.loads((model / "config.json").read_text())
    raw["text_config"] |= text
    raw["vision_config"]["num_heads"] = vision_heads
    (model / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("gpu", "version", "reason"),
    [("/nowhere", "2.11.0", "no GPU in /dev"), ("/dev/null", "2.11.0+cpu", "torch 2.11.0.cpu is built without CUDA")],
)
def test_device_cuda_needs_a_gpu_and_a_torch_for_it(gpu, version, reason, monkeypatch):
    monkeypatch.setattr(parallelism, "GPUS", [Path(gpu)])
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(ConfigError, match=f"^--device cuda: {reason}; choose --device cpu or auto"):
        startup_checks.check_device_and_tls(EngineConfig(device="cuda"))
    startup_checks.check_device_and_tls(EngineConfig())


def test_keys_that_are_none_or_encrypted_are_refused(tmp_path):
    certificate, key = make_certificate(tmp_path, "DNS:localhost")
    encrypt = ["openssl", "pkey", "-aes256", "-passout", "pass:x", "-in", key, "-out", tmp_path / "encrypted"]
    subprocess.run(encrypt, check=True, capture_output=True)
    for unusable, said in (
        (certificate, "--ssl-keyfile, --ssl-certfile: "),
        (encrypt[-1], "--ssl-keyfile: the key is"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}"):
            config = EngineConfig(ssl_certfile=str(certificate), ssl_keyfile=str(unusable))
            startup_checks.check_device_and_tls(config)


def test_a_hub_name_is_found_in_the_cache_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = put_in_cache(tmp_path, "some/model", "v2")
    assert resolve_model(EngineConfig(model="some/model", revision="v2")) == str(snapshot)
    (tmp_path / "file").touch()
    for name, reason in {
        "some/model": "",  # in another revision
        "/no/such/place": "there is no such path",
        "./nowhere": "there is no such path",
        str(tmp_path / "file"): "it is a file; give the directory that has config.json",
    }.items():
        with pytest.raises(ConfigError, match=f"'{name}' is neither a directory nor an available hub model: {reason}"):
            resolve_model(EngineConfig(model=name))


def test_files_that_are_missing_or_damaged_are_named(model):
    config, unusable = model / "config.json", f"the model in {model} cannot be served: "
    for change, error in (
        (
            lambda: (model / "tokenizer.json").write_text('{"model": {"vocab"'),
            "tokenizer.json is truncated or not a JSON",
        ),
        (
            lambda: (model / "tokenizer.json").write_text("[]"),
            "tokenizer.json is truncated or not a JSON object .*; down",
        ),
        ((model / "tokenizer.json").unlink, f"{model} has no tokenizer.json; write it with"),
        (lambda: config.write_text('{"a": 1} x'), f"{unusable}.*Extra data"),
        (lambda: config.write_text("[]"), f"{unusable}config.json is not a JSON object; download it again"),
        (config.unlink, f"{unusable}.*No such file .*config.json"),
    ):
        change()
        with pytest.raises(ConfigError, match=error):
            check_model(str(model), EngineConfig())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "vision_heads", "ranks", "message"),
    [
        (4, 2, 4, 4, None),
        (4, 2, 4, 3, "heads cannot be divided by 3; choose a divisor of 4, the number of attention heads"),
        (6, 6, 4, 3, "a divisor of 4, the number of vision heads, or --mm-encoder-tp-mode data"),
        (12, 3, 4, 2, "a divisor or multiple of 3, the number of key-value heads"),
    ],
)
def test_heads_must_divide(heads, kv_heads, vision_heads, ranks, message, model):
    edit_config(model, vision_heads, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=32)
    config = EngineConfig(tensor_parallel_size=ranks, load_format="dummy")
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            check_model(str(model), config)
    if message is None or "vision" in message:
        check_model(str(model), dataclasses.replace(config, mm_encoder_tp_mode="data"))


def test_a_length_beyond_the_context_of_the_model(model):
    edit_config(model, max_position_embeddings=1000)
    check_model(str(model), EngineConfig(max_model_len=1000))
    with pytest.raises(ConfigError, match="--max-model-len: 1001 exceeds the model's context length, 1000"):
        check_model(str(model), EngineConfig(max_model_len=1001))


# --- the media cache and settings without effect ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [("shm", {"data_parallel_size": 3}), ("lru", {"tensor_parallel_size": 2})])
def test_size_of_the_media_cache(kind, count):
    (holders,) = count.values()
    config = EngineConfig(mm_processor_cache_type=kind, mm_processor_cache_gb=2**-10, **count)
    plan = startup_checks.plan_media_cache(config)
    assert (plan.kind, plan.nbytes) == (kind, (1 << 20) // holders if kind == "shm" else 1 << 20)  # lru: of each worker
    with pytest.raises(ConfigError, match="--mm-processor-cache-gb: .* GiB of free memory; lower it"):
        startup_checks.plan_media_cache(dataclasses.replace(config, mm_processor_cache_gb=1e6))
    assert startup_checks.plan_media_cache(dataclasses.replace(config, mm_processor_cache_gb=0)).kind == "off"


def test_settings_without_effect_are_named():
    shm, off = MediaCachePlan("shm", 1 << 30, ""), MediaCachePlan("off", 0, "")
    for flags, cache, device, reason in [
        ("", off, "cuda", None),
        ("--gpu-memory-utilization 0.8", shm, "cpu", "the workers run on the CPU"),
        ("--enforce-eager", shm, "cpu", "CUDA graphs need CUDA"),
        ('--limit-mm-per-prompt {"image":{"width":9}}', shm, "cpu", "only `count` is used"),
        ("--mm-encoder-tp-mode data", shm, "cpu", "an engine has one worker"),
        ("--distributed-backend gloo", shm, "cpu", "an engine has one worker"),
        ("--distributed-backend gloo -dp 2", shm, "cuda", None),  # workers of several engines share a device
        ("--gpu-memory-utilization 0.5 --kv-cache-memory-bytes 1", shm, "cuda", "--kv-cache-memory-bytes overrides it"),
        (
            "--kv-cache-memory-bytes 1 --num-gpu-blocks-override 1",
            shm,
            "cuda",
            "--num-gpu-blocks-override overrides it",
        ),
        ("--mm-processor-cache-type shm", off, "cpu", "the cache is off"),
        ("--mm-shm-cache-max-object-size-mb 3", off, "cpu", "no cache in shared memory"),
        ("--state-snapshot-interval 512", shm, "cpu", "the model has no recurrent states"),
        ("--revision main", shm, "cpu", "MODEL is a directory"),
    ]:
        named = without_effect(parse(flags.split(), {}), cache, EngineLimits(4096, 8, 16, 45, device))
        assert named == ([] if reason is None else [f"{flags.split()[0]} ({reason})"]), flags


# --- the runtime directory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["/proc", "/nowhere"])
def test_no_room_for_a_runtime_directory(base, monkeypatch):
    monkeypatch.setenv("TMPDIR", base)
    with pytest.raises(ConfigError, match=f"^cannot create a directory in {base} .*: set TMPDIR"), runtime_directory():
        pass


def test_a_relative_tmpdir_outlives_a_change_of_the_working_directory(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        monkeypatch.chdir(root)
        monkeypatch.setenv("TMPDIR", ".")
        with runtime_directory() as path:
            os.chdir(tmp_path)
            assert path.parent.samefile(root) and path.is_dir()


@pytest.mark.parametrize("name", ["", "x" * 50, "日" * 30, os.fsdecode(b"caf\xe9")])
def test_a_tmpdir_that_is_no_place_for_sockets_is_not_used(name, monkeypatch):
    """A socket's path is limited in bytes, and its address is UTF-8."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        base = Path(root, name)
        base.mkdir(exist_ok=True)
        monkeypatch.setenv("TMPDIR", name and str(base))
        with runtime_directory() as path:
            assert path.parent == Path("/tmp")
            assert len(os.fsencode(path / "1" / "core-100-workers")) <= MAX_UNIX_PATH
