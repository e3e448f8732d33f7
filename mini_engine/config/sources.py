"""Where settings come from: text of a flag or a variable, values of a file; and how `--print-config` writes them.

`from_file` reads what `to_yaml` writes. This file knows nothing of argparse.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_origin

import msgspec
import yaml

from mini_engine.config import ENV_PREFIX, ConfigError, EngineConfig, Option, env_of, field_types, fields, flag_of
from mini_engine.config.options import parse_text, plain_type, values_of

CONFIG_ENV = env_of("config")
IPC_SWITCH_ENV = env_of("multimodal_tensor_ipc")
IPC_SWITCH = {"1": "torch_shm", "0": "direct_rpc"}
NOT_SETTINGS = (env_of("bench_"), env_of("failpoints"))  # of benchmarks and tests

# Flags of vLLM's server without an option here, and what to do instead.
VLLM_FLAGS = {
    "--enable-chunked-prefill": "chunked prefill is always on; omit the flag",
    "--no-enable-chunked-prefill": "chunked prefill is always on; see --max-num-batched-tokens",
    "--swap-space": "preempted requests are recomputed; omit the flag",
    "--pipeline-parallel-size": "there is no pipeline parallelism; use --tensor-parallel-size",
    "-pp": "there is no pipeline parallelism; use --tensor-parallel-size",
    "--distributed-executor-backend": "workers are processes of one host; omit the flag",
    "--quantization": "quantised weights are not supported; --dtype lists the formats",
    "-q": "quantised weights are not supported; --dtype lists the formats",
    "--kv-cache-dtype": "the KV cache has the format of --dtype",
    "--enable-lora": "LoRA adapters are not supported; merge the adapter into the weights",
    "--tokenizer": "the tokenizer is read from the directory of MODEL",
    "--compilation-config": "there is no torch.compile; --enforce-eager switches CUDA graphs off",
    "--disable-mm-preprocessor-cache": "use --mm-processor-cache-gb 0",
    "--override-generation-config": "--generation-config takes a directory with a generation_config.json",
}


class Given(NamedTuple):
    """A value for a field, and what gave it, such as `--port` or `serve.yaml`."""

    value: Any
    origin: str


def unknown(name: str, known: Collection[str], prefix: str = "") -> str:
    """The end of an error about a name that is not `known`. `prefix`: what all of them begin with."""
    if flag := VLLM_FLAGS.get(name):
        return f"not supported: {flag}"
    ends = {each.removeprefix(prefix): each for each in known}
    near = difflib.get_close_matches(name.removeprefix(prefix), ends, n=1, cutoff=0.7)
    return f"unknown; did you mean {ends[near[0]]}?" if near else "unknown; --help lists the flags"


def read(name: str, value: Any, origin: str) -> Any:
    """The value of the field `name`, from a text as flags and variables give it, or from a value as YAML gives it.

    Raises:
        ConfigError: it cannot be read as the field's type, or is out of its limits.
    """
    opt: Option = EngineConfig.__dataclass_fields__[name].metadata["option"]
    kind = plain_type(field_types()[name])
    bounded = Annotated[kind, msgspec.Meta(ge=opt.minimum, le=opt.maximum)] if kind in (int, float) else kind
    try:
        parsed = value
        if get_origin(kind) is list:
            parsed = _list_items(value)
        elif isinstance(value, str):
            parsed = parse_text(opt, kind, value)
        return None if parsed is None else msgspec.convert(parsed, bounded, strict=False)
    except ValueError:
        hint = f"; put MODEL before {flag_of(name)} alone" if opt.bare is not None else ""
        raise ConfigError(f"{origin}: {value!r} is not {values_of(opt, kind)}{hint}") from None


def _list_items(value: Any) -> list[Any]:
    """The items of `a,b`, of `["a", "b"]`, or of a list of which each may be such a JSON list."""
    if isinstance(value, str):
        value = [value] if value.startswith("[") else [part.strip() for part in value.split(",")]
    items: list[Any] = []
    for part in value if isinstance(value, list) else [value]:
        try:
            items += json.loads(part) if isinstance(part, str) and part.startswith("[") else [part]
        except ValueError:
            items.append(part)  # an IPv6 address begins like this, too
    return items


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """What `MINI_ENGINE_<FIELD>` variables give, by field.

    Raises:
        ConfigError: a value cannot be used.
    """
    variables = {field.name: env_of(field.name) for field in fields() if env_of(field.name) in environ}
    given = {name: Given(read(name, environ[variable], variable), variable) for name, variable in variables.items()}
    if (switch := environ.get(IPC_SWITCH_ENV)) is not None:
        if switch not in IPC_SWITCH:
            raise ConfigError(f"{IPC_SWITCH_ENV}: {switch!r} is not 1 or 0")
        given.setdefault("mm_tensor_ipc", Given(IPC_SWITCH[switch], IPC_SWITCH_ENV))
    return given


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that looks like a setting and is none.

    Not an error: Kubernetes sets some for every service, and a service may have this program's name.
    """
    known = {env_of(field.name) for field in fields()} | {CONFIG_ENV, IPC_SWITCH_ENV}
    return [
        f"{name}: {unknown(name, known, ENV_PREFIX)}"
        for name in sorted(environ)
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(NOT_SETTINGS)
    ]


def from_file(path: str) -> dict[str, Given]:
    """What a YAML file gives, by field: flags without their dashes in front, or fields' names, each with its value.

    Raises:
        ConfigError: the file cannot be read, or a setting in it is unknown or has a value that cannot be used.
    """
    try:
        settings = yaml.safe_load(Path(path).read_bytes()) or {}
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"--config: {path} holds no settings, one a line, such as `port: 8000`")
    flags = {flag_of(field.name): field.name for field in fields()}
    given: dict[str, Given] = {}
    for key, value in settings.items():
        flag = flag_of(str(key))
        if flag not in flags:
            raise ConfigError(f"{path}: {key}: {unknown(flag, flags, '--')}")
        if value is not None:
            given[flags[flag]] = Given(read(flags[flag], value, f"{path}: {key}"), path)
    return given


def to_yaml(config: EngineConfig, origins: Mapping[str, str]) -> str:
    """All settings by group, each with its origin: a file for `--config`, but for what is secret."""
    lines: list[str] = []
    group = ""
    for field in fields():
        opt: Option = field.metadata["option"]
        if opt.group != group:
            group = opt.group
            lines += ["", f"# {group}"]
        value, key = getattr(config, field.name), flag_of(field.name)[2:]
        text = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=float("inf"))[1:-2]
        line = f"# {key}: not shown" if opt.secret and value else f"{key}: {text}"
        default = f"default: {opt.unset}" if opt.unset else "default"
        lines.append(f"{line}  # {origins.get(field.name, default)}")
    return "\n".join(lines[1:]) + "\n"
