"""Settings from variables and files, and as `--print-config` writes them."""

from __future__ import annotations

import re
from typing import Any, get_origin

import pytest

from mini_engine import config
from mini_engine.cli import parse
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.config.option import choices_of, plain_type
from mini_engine.config.sources import from_file, read, to_yaml, unknown_variables

SAMPLES = {int: 3, float: 4.5, bool: True, str: "it's # a: text", list: ["a", "[b]:1", "1"]}


def sample(field: Any, kind: Any) -> Any:
    """A value that is not the default."""
    if choices_of(kind):
        return choices_of(kind)[-1]
    if field.name == "limit_mm_per_prompt":
        return {"video": 3}
    if field.metadata["option"].metavar == "JSON":
        return {"video": {"fps": 2.5, "deep": {"list": [1, None, "a"]}}}
    if plain_type(kind) is bool:
        return not field.default
    low = field.metadata["option"].minimum or 0
    value = SAMPLES[get_origin(plain_type(kind)) or plain_type(kind)]
    return value if isinstance(value, (str, list)) else min(low + value, field.metadata["option"].maximum or 10**9)


def test_every_setting_survives_the_file(tmp_path):
    kinds = config.field_types()
    every = EngineConfig(**{field.name: sample(field, kinds[field.name]) for field in config.fields()})
    path = tmp_path / "all.yaml"
    path.write_text(to_yaml(every, {"api_key": "--api-key", "port": "--port"}))
    given = from_file(str(path), [])
    assert {name: one.value for name, one in given.items()} == {
        field.name: getattr(every, field.name) for field in config.fields() if field.name != "api_key"
    }
    assert given["model"].origin == f"{path} line 2"


def test_what_is_secret_is_not_printed():
    text = to_yaml(EngineConfig(api_key=["hush"]), {"api_key": "MINI_ENGINE_API_KEY"})
    assert "hush" not in text and "# api-key: not shown  # MINI_ENGINE_API_KEY" in text


def test_each_setting_can_be_given_by_its_variable():
    for field in config.fields():
        kind = config.field_types()[field.name]
        value = sample(field, kind) if field.metadata["option"].metavar != "JSON" else {}
        text = ",".join(value) if isinstance(value, list) else str(value)
        variable = config.env_of(field.name)
        try:
            assert getattr(parse([], {variable: text}), field.name) == value, field.name
        except ConfigError as error:  # read, and then refused for what it says
            assert variable in str(error) or config.flag_of(field.name) in str(error)


def test_a_file_as_users_write_one(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: M\n"
        "max_num_seqs: 8  # underscores work as dashes\n"
        "kv-cache-memory-bytes: 512M\n"
        "media-fetch-timeout: 3\n"
        "limit-mm-per-prompt: '{\"video\": 1}'\n"
        "media-io-kwargs:\n  video:\n    num_frames: 10\n"
        "allowed-media-domains: [a.example, 'b.example:80']\n"
        "served-model-name: one\n"
        "enable-prefix-caching: no\n"
        "seed: null\n"
    )
    assert parse(["--config", str(path)], {}) == EngineConfig(
        model="M", max_num_seqs=8, kv_cache_memory_bytes=512 << 20, media_fetch_timeout=3.0,
        limit_mm_per_prompt={"video": 1}, media_io_kwargs={"video": {"num_frames": 10}},
        allowed_media_domains=["a.example", "b.example:80"], served_model_name=["one"], enable_prefix_caching=False,
    )  # fmt: skip
    path.write_text("")
    assert parse(["--config", str(path)], {}) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("port: 1\nmax-num-seq: 3\n", "line 2: 'max-num-seq' is not a setting; did you mean max-num-seqs?"),
        ("bogus: 3\n", "line 1: 'bogus' is not a setting; --help lists them"),
        ("port: 1\nhost: a\nport: 2\n", "line 3: 'port' stands there for the second time"),
        ("max-num-seqs: 1\nmax_num_seqs: 1\n", "line 2: 'max_num_seqs' stands there for the second time"),
        ("port: yes\n", "line 1: port: True is not a whole number from 0 to 65535"),
        ("port: 70000\n", "line 1: port: 70000 is not a whole number from 0 to 65535"),
        ("api-key: [1]\n", "line 1: api-key: [1] is not a list of texts"),
        ("dtype: int3\n", "is not one of auto, float32"),
        ("quantization: awq\n", "line 1: 'quantization' is not a setting; not supported: "),
        ("media-io-kwargs.video.fps: 3\n", "; the parts of media-io-kwargs are written below it, one level each"),
        ("media-io-kwargs: 3\n", "is not a JSON object"),
        ("kv-cache-memory-bytes: 12Q\n", "'12Q' is not a size"),
        ("a: {\n", "is not YAML"),
        ("- port\n", "holds no settings"),
        ("served-model-name: ['']\n", "--served-model-name"),
        *(
            (f"port: {value}\n", "is not YAML")
            for value in (
                "2001-99-99",
                "!!int foo",
                "!!int ''",
                "!!float x",
                "!!timestamp zz",
                "!!bool maybe",
                "9" * 5000,
                "!include x",
                "*x",
            )
        ),
        ("? [a, b]\n: c\n", "line 1: a key must be the name of a setting"),
        ("media-io-kwargs: &a {video: *a}\n", "is not YAML: found unconstructable recursive node"),
        ("media-io-kwargs: " + "{a: " * 3000 + "1" + "}" * 3000, "has too many levels"),
        (
            "mm-processor-kwargs:\n  a0: &a0 [x]\n"
            + "".join(f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40)),
            "holds more than 100000 values once its aliases are written out",
        ),
        (f"media-io-kwargs: {{video: {{num_frames: {10**30}}}}}\n", "holds a number that is out of range"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line(tmp_path, text, named):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        parse(["--config", str(path)], {})
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match="--config: /not/there.yaml cannot be read: No such file"):
        parse(["--config", "/not/there.yaml"], {})


def test_variables_that_are_no_settings():
    environ = {"MINI_ENGINE_PORTS": "1", "MINI_ENGINE_SERVICE_HOST": "1", "MINI_ENGINE_PORT": "1", "PORTS": "1"}
    environ |= {"MINI_ENGINE_BENCH_X": "1", "MINI_ENGINE_CONFIG": "1", "MINI_ENGINE_MULTIMODAL_TENSOR_IPC": "1"}
    assert unknown_variables(environ) == [
        "MINI_ENGINE_PORTS is not a setting of this server; did you mean MINI_ENGINE_PORT?",
        "MINI_ENGINE_SERVICE_HOST is not a setting of this server",
    ]


def test_a_value_is_read_as_its_type():
    assert read("mm_processor_cache_gb", 4, "x").value == 4.0
    assert read("revision", "null", "x").value == "null"
    with pytest.raises(ConfigError, match=re.escape("x: 1.5 is not a whole number")):
        read("seed", 1.5, "x")
