"""Values and records of any kind: what cannot be used is one line, before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mini_engine.bench.cli import parse
from mini_engine.bench.datasets.loading import load
from mini_engine.bench.redaction import config_of
from mini_engine.bench.serving.settings import settings_of
from mini_engine.config import ConfigError

LONG = "x" * 300
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "flags",
    [
        ("--goodput", "ttft:nan"), ("--goodput", "ttft:inf"), ("--extra-body", '{"a": NaN}'),
        ("--extra-body", '{"a": 1e999}'), ("--extra-body", DEEP), ("--extra-body", "{"),
        ("--header", "a b=c"), ("--header", "A=b\nc"), ("--header", "A=\u2603"),
        ("--request-rate", "5e-324"), ("--request-rate", "nan"), ("--request-rate", "1", "--burstiness", "inf"),
        ("--request-rate", "1", "--burstiness", "1e308"), ("--request-rate", "1", "--burstiness", "1e-320"),
        ("--port", "0"), ("--port", "-1"), ("--port", "99999"), ("--host", ""), ("--model", ""), ("--tokenizer", " "),
        ("--base-url", ""), ("--base-url", "foo"), ("--base-url", "file:///etc"), ("--base-url", "unix:/x"),
        ("--base-url", "http://[::1"), ("--base-url", "http://x:99999"), ("--base-url", "http://x?a=b"),
        ("--base-url", "http://a b"), ("--endpoint", "v1"), ("--endpoint", ""), ("--seed", "-1"),
        ("--launch", "--print-config"), ("--output-len", "0"), ("--num-prompts", "1e3"),
        ("--save-result", "--result-filename", LONG), ("--save-result", "--result-dir", LONG), ("--plot", LONG),
        ("--save-result", "--result-filename", ""),
    ],
)  # fmt: skip
def test_values_of_no_use(flags: tuple[str, ...]):
    with pytest.raises(ConfigError) as caught:
        settings_of(parse(["--dataset-name", "text", *flags]))
    said = str(caught.value)
    assert said.startswith("--") and "\n" not in said and len(said) < 500


@pytest.mark.parametrize("flag", ["--num-prompts", "--num-warmups"])
def test_more_prompts_than_memory_holds(flag: str):
    with pytest.raises(ConfigError, match=f"^{flag}: 1000000000000 is above 100000: .*; send more in several runs"):
        parse([flag, str(10**12)])


@pytest.mark.parametrize("flag", ["--input-len", "--random-prefix-len", "--random-mm-base-items-per-request"])
def test_a_prompt_that_memory_does_not_hold(flag: str):
    with pytest.raises(ConfigError, match=f"^{flag}.*: 1000000000000 is above "):
        parse([flag, str(10**12)])


def test_more_rounds_than_anybody_waits_for():
    with pytest.raises(ConfigError, match="^--rounds: 1000000000000 is above 1000$"):
        parse(["ab", "--a", "", "--b", "", "--rounds", str(10**12)])


def test_no_error_tells_a_key(monkeypatch):
    for flags in (["--header", "Authorization=sesame\n"], ["--base-url", "http://me:sesame@host"]):
        with pytest.raises(ConfigError) as caught:
            parse(flags)
        assert "sesame" not in str(caught.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame\n")
    with pytest.raises(ConfigError, match="^OPENAI_API_KEY: ") as caught:
        settings_of(parse([]))
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["{(2, 2, 1): 1e400}", "{(1e400, 2, 1): 1}", "{(100000, 2, 1): 1}", "{(16384, 16384, 8): 1}", "{(2, 2, 1): -1}"],
)
def test_sizes_of_no_use(text: str):
    with pytest.raises(ConfigError, match="^--random-mm-bucket-config: "):
        parse(["--dataset-name", "random-mm", "--random-mm-bucket-config", text])


@pytest.mark.parametrize(("host", "root"), [("::1", "http://[::1]:8000"), ("[::1]", "http://[::1]:8000")])
def test_an_ipv6_address_is_a_host(host: str, root: str):
    assert settings_of(parse(["--host", host])).root == root


def read(path: Path, data: bytes) -> list:
    path.write_bytes(data)
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "1", "--num-warmups", "0"]
    args = parse(flags)
    json.dumps(config_of(args), allow_nan=False)
    return load(settings_of(args).data).samples


def message(content: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"\xff\xfe\x00", DEEP.encode(), b'{"prompt": "x", "n": %s}' % (b"9" * 5000),
        *(b'{"prompt": "x", "output_tokens": %s}' % value
          for value in (b'"abc"', b"-5", b"0", b"NaN", b"1e400", b"[1]", b"true", b"9" * 400)),
        b'{"prompt": "x", "expected": 5}', b'{"prompt": "x", "image": "a\\u0000b"}',
        b'{"prompt": "x", "image": "\\ud800"}', b'{"prompt": "x", "image": %s}' % (b"[" * 400 + b"]" * 400),
        b'{"prompt": "x", "image": "%s"}' % (b"x" * 400),
        message([None]), message([{"type": ["x"]}]), message([{"type": "image_url"}]),
        message([{"type": "image_url", "image_url": {"url": 5}}]),
    ],
)  # fmt: skip
def test_records_of_no_use(tmp_path: Path, data: bytes):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "d.jsonl", data)
    assert len(str(caught.value)) < 700


def test_records_as_some_write_them(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    assert read(path, b'\xef\xbb\xbf{"prompt": "\xc3\xa9"}')[0].messages[0].parts == ("é",)
    assert read(path, message([{"type": "text", "text": "b"}]))[0].messages[0].parts == ("b",)
    link = read(path, message([{"type": "image_url", "image_url": "http://x"}]))[0].shown[0]
    assert (link.url, link.kind) == ("http://x", "image")
    greeted = [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    (sample,) = read(path, json.dumps({"conversations": greeted, "output_tokens": 3}).encode())
    assert [(turn.role, turn.text) for turn in sample.messages] == [("assistant", "hello"), ("user", "q")]


@pytest.mark.parametrize("name", ["custom", "hf"])
def test_a_path_that_is_too_long(name: str):
    with pytest.raises(ConfigError, match="^--dataset-path: "):
        load(settings_of(parse(["--dataset-name", name, "--dataset-path", LONG])).data)
