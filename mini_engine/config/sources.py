"""Where settings come from beside the command line: variables and a file; and how `--print-config` writes one.

`from_file` reads what `to_yaml` writes. This file knows nothing of argparse.
"""

import difflib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec.yaml
import yaml

from mini_engine import failpoints
from mini_engine.config import ENV_PREFIX, ConfigError, EngineConfig, Setting, fields, flag_of, groups, results

CONFIG_ENV = ENV_PREFIX + "CONFIG"
IPC_SWITCH_ENV = ENV_PREFIX + "MULTIMODAL_TENSOR_IPC"
IPC_SWITCH = {"1": "torch_shm", "0": "direct_rpc"}

# Flags of vLLM's server without an option here, and what to do instead.
VLLM_FLAGS = {
    "--enable-chunked-prefill": "chunked prefill is always on; omit the flag",
    "--no-enable-chunked-prefill": "chunked prefill is always on; see --max-num-batched-tokens",
    "--swap-space": "preempted requests are recomputed; omit the flag",
    "--pipeline-parallel-size": "there is no pipeline parallelism; use --tensor-parallel-size",
    "-pp": "there is no pipeline parallelism; use --tensor-parallel-size",
    "--distributed-executor-backend": "workers are processes of one host; omit the flag",
    "--kv-cache-dtype": "the KV cache has the format of --dtype",
    "--enable-lora": "LoRA adapters are not supported; merge the adapter into the weights",
    "--tokenizer": "the tokenizer is read from the directory of MODEL",
    "--compilation-config": "there is no torch.compile; --enforce-eager switches CUDA graphs off",
    "--disable-mm-preprocessor-cache": "use --mm-processor-cache-gb 0",
    "--enable-auto-tool-choice": "tools are always on; omit the flag, or see --tool-call-parser",
    "--task": "use --runner and --convert",
    "--hf-overrides": "a reranker needs none: --convert classify compares its tokens yes and no",
    "--override-generation-config": "--generation-config takes a directory with a generation_config.json",
}


class Given(NamedTuple):
    """A value for a field, and its origin, such as `--port` or `serve.yaml`."""

    value: Any
    origin: str


def unknown(flag: str) -> str:
    """The end of an error about a flag that does not exist, or about a key or variable that stands for one."""
    if flag in VLLM_FLAGS:
        return f"not supported: {VLLM_FLAGS[flag]}"
    known = {known for setting in fields() for known in setting.flags}
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
    return f"unknown; did you mean {near[0]}?" if near else "unknown; --help lists the flags"


def refuse_unknown(flag: str) -> NoReturn:
    """Raises ConfigError."""
    raise ConfigError(f"{flag}: {unknown(flag)}")


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """The values of `MINI_ENGINE_<FIELD>` variables, by field. Raises ConfigError: some cannot be used."""

    def read(setting: Setting) -> tuple[str, Given]:
        return setting.name, Given(setting.read(environ[setting.variable], setting.variable), setting.variable)

    given = dict(results(partial(read, setting) for setting in fields() if setting.variable in environ))
    if (switch := environ.get(IPC_SWITCH_ENV)) is not None:
        if switch not in IPC_SWITCH:
            raise ConfigError(f"{IPC_SWITCH_ENV}: {switch!r} is not 1 or 0")
        given.setdefault("mm_tensor_ipc", Given(IPC_SWITCH[switch], IPC_SWITCH_ENV))
    return given


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that looks like a setting and is none. Not an error: Kubernetes sets some for every
    service, and a service may have this program's name."""
    known = {setting.variable for setting in fields()} | {CONFIG_ENV, IPC_SWITCH_ENV, failpoints.VARIABLE}
    return [
        f"{name} is ignored: {unknown(flag_of(name.removeprefix(ENV_PREFIX).lower()))}"
        for name in sorted(environ)
        if name.startswith(ENV_PREFIX) and name not in known
    ]


def from_file(path: str) -> dict[str, Given]:
    """The values of a YAML file, by field. Its keys are flags without their dashes in front, or fields' names. Raises
    ConfigError: the file cannot be read, or settings in it are unknown or have values that cannot be used."""
    if not path:
        raise ConfigError(f"{CONFIG_ENV}: empty; leave it out for the default")
    try:
        values = msgspec.yaml.decode(Path(path).read_bytes(), type=dict[str, Any] | None) or {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config: {path} cannot be read: {' '.join(str(error).split())}") from None
    known = {setting.flag: setting for setting in fields()}

    def read(key: str, value: Any) -> tuple[str, Given]:
        if (setting := known.get(flag_of(key))) is None:
            raise ConfigError(f"{path}: {key}: {unknown(flag_of(key))}")
        return setting.name, Given(setting.read(value, f"{path}: {key}"), path)

    return dict(results(partial(read, key, value) for key, value in values.items() if value is not None))


def to_yaml(config: EngineConfig, origins: Mapping[str, str], changed_only: bool = False) -> str:
    """All settings by group, or those that are not the defaults, each with its origin: a file for `--config`, but for
    what is secret."""
    lines: list[str] = []
    for group, settings in groups().items():
        if changed_only:
            settings = [setting for setting in settings if getattr(config, setting.name) != setting.default]
        lines += ["", f"# {group}"] if settings else []
        for setting in settings:
            value, key = getattr(config, setting.name), setting.flag[2:]
            text = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=float("inf"))[1:-2]
            line = f"# {key}: not shown" if setting.secret and value else f"{key}: {text}"
            default = f"default: {setting.unset}" if setting.unset else "default"
            lines.append(f"{line}  # {origins.get(setting.name, default)}")
    return "".join(f"{line}\n" for line in lines[1:])
