"""Where settings come from beside the command line: variables and a file; and how `--print-config` writes one.

`from_file` reads what `to_yaml` writes. This file knows nothing of argparse.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec.yaml
import yaml

from mini_engine import failpoints
from mini_engine.config import ENV_PREFIX, EngineConfig, fields, flag_of, groups

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
    "--hf-overrides": "edit config.json; a reranker needs no change, see --convert classify",
    "--rope-scaling": "edit config.json",
    "--speculative-config": "there is no speculative decoding; omit the flag",
    "--cpu-offload-gb": "weights stay on the device; --quantization makes them smaller",
    "--guided-decoding-backend": "structured output is always on; omit the flag",
    "--structured-outputs-config": "structured output is always on; omit the flag",
    "--scheduling-policy": "requests have priorities; omit the flag, or see --ignore-priority",
    "--enable-expert-parallel": "each rank has a part of every expert; omit the flag",
    "--skip-mm-profiling": "use --kv-cache-memory-bytes",
    "--override-generation-config": "--generation-config takes a directory with a generation_config.json",
    "--language-model-only": """use --limit-mm-per-prompt '{"image": 0, "video": 0}'""",
    "--lora-modules": "LoRA adapters are not supported; merge the adapter into the weights",
    "--download-dir": "set the variable HF_HOME",
    "--hf-token": "set the variable HF_TOKEN",
    "--uvicorn-log-level": "use --log-level",
    "--disable-uvicorn-access-log": "only --enable-log-requests logs every request; omit the flag",
    "--max-log-len": "prompts are never logged; omit the flag",
    "--chat-template-content-format": "the template gets contents as they are sent, texts or parts; omit the flag",
    "--interleave-mm-strings": "media are always where the message has them; omit the flag",
    "--video-pruning-rate": "video tokens are not pruned; see --media-io-kwargs and --mm-processor-kwargs",
    "--default-chat-template-kwargs": "send chat_template_kwargs with each request",
    "--enable-prompt-tokens-details": "usage always has them; omit the flag",
    "--enable-reasoning": "thoughts are always separated; omit the flag, or see --reasoning-parser",
    "--logprobs-mode": "logprobs are those before temperature, penalties and filters; omit the flag",
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


def from_environment(environ: Mapping[str, str], errors: list[str]) -> dict[str, Given]:
    """The values of `MINI_ENGINE_<FIELD>` variables, by field; for each that cannot be used a line in `errors`."""
    given = {}
    if (switch := environ.get(IPC_SWITCH_ENV)) is not None:
        given["mm_tensor_ipc"] = Given(IPC_SWITCH.get(switch), IPC_SWITCH_ENV)
        if switch not in IPC_SWITCH:
            errors.append(f"{IPC_SWITCH_ENV}: {switch!r} is not 1 or 0")
    for setting in fields():
        if (text := environ.get(setting.variable)) is not None:
            given[setting.name] = Given(setting.read(text, setting.variable, errors), setting.variable)
    return given


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that looks like a setting and is none, and one for those of vLLM. Not an error:
    Kubernetes sets some for every service, and a service may have this program's name."""
    known = {setting.variable for setting in fields()} | {CONFIG_ENV, IPC_SWITCH_ENV, failpoints.VARIABLE}
    warnings = [
        f"{name} is ignored: {unknown(flag_of(name.removeprefix(ENV_PREFIX).lower()))}"
        for name in sorted(environ)
        if name.startswith(ENV_PREFIX) and name not in known
    ]
    if names := ", ".join(sorted(name for name in environ if name.startswith("VLLM_"))):  # VLLM_API_KEY above all
        example = f"{ENV_PREFIX}API_KEY for --api-key"
        warnings.append(f"{names}: ignored; variables are named after the flags, such as {example}")
    return warnings


def from_file(path: str, errors: list[str]) -> dict[str, Given]:
    """The values of a YAML file, by field. Its keys are flags without their dashes in front, or fields' names. For each
    that is unknown or cannot be used, and for a file that cannot be read, there is a line in `errors`."""
    given: dict[str, Given] = {}
    values: dict[str, Any] = {}
    known = {setting.flag: setting for setting in fields()}
    try:
        values = msgspec.yaml.decode(Path(path).read_bytes(), type=dict[str, Any] | None) or {}
    except (OSError, ValueError) as error:
        problem = f"--config: {path} cannot be read: {' '.join(str(error).split())}"
        errors.append(problem if path else f"{CONFIG_ENV}: empty; leave it out for the default")
    for key, value in values.items():
        if (setting := known.get(flag_of(key))) is None:
            errors.append(f"{path}: {key}: {unknown(flag_of(key))}")
        elif value is not None:
            given[setting.name] = Given(setting.read(value, f"{path}: {key}", errors), path)
    return given


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
