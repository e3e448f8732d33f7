"""Flags of vLLM's server that this one does not have: what there is instead, and which values change nothing."""

from __future__ import annotations

import re
from typing import Any

from mini_engine.config.options import ConfigError

_CHUNKS = "prompts longer than --max-num-batched-tokens are always computed in chunks"
_COMPILATION = "--enforce-eager is the only choice"
_GENERATES = "MODEL always generates text"
_LORA = "LoRA adapters; merge the adapter into the weights"
_ONE_HOST = "all processes run on one host"
_SPECULATION = "speculative decoding"
_STRUCTURE = "structured output"
_TOOLS = "tool calls"
_FILES = "it is read from the directory of MODEL; put the files there"
_LAYERS = "layers are not distributed to workers; --tensor-parallel-size splits each of them"
_QUANTISED = "quantised weights; --dtype lists the formats"

NOT_SUPPORTED = {
    "--data-parallel-address": _ONE_HOST,
    "--data-parallel-size-local": _ONE_HOST,
    "--headless": _ONE_HOST,
    "--no-enable-chunked-prefill": _CHUNKS,
    "--kv-transfer-config": "the KV cache of an engine is its own",
    "--quantization": _QUANTISED,
    "-q": _QUANTISED,
    "--speculative-config": _SPECULATION,
    "--speculative-model": _SPECULATION,
    "--num-speculative-tokens": _SPECULATION,
    "--compilation-config": _COMPILATION,
    "-O": _COMPILATION,
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--tool-call-parser": _TOOLS,
    "--enable-auto-tool-choice": _TOOLS,
    "--reasoning-parser": "reasoning is not separated from the answer",
    "--guided-decoding-backend": _STRUCTURE,
    "--structured-outputs-config": _STRUCTURE,
    "--tokenizer": _FILES,
    "--hf-overrides": _FILES,
    "--video-pruning-rate": "all of a video counts; --media-io-kwargs samples fewer frames",
    "--disable-mm-preprocessor-cache": "use --mm-processor-cache-gb 0",
    "--override-generation-config": "--generation-config names a directory with such a file",
    "--otlp-traces-endpoint": "traces; /metrics has histograms of each stage of a request",
}

# Some values of these ask for nothing that is missing: those that the pattern matches whole; None: it takes no value.
NO_EFFECT: dict[str, tuple[str | None, str]] = {
    "--pipeline-parallel-size": ("1", _LAYERS),
    "-pp": ("1", _LAYERS),
    "--distributed-executor-backend": ("mp|uni", "workers are processes of this host"),
    "--nnodes": ("1", _ONE_HOST),
    "--node-rank": ("0", _ONE_HOST),
    "--enable-chunked-prefill": (None, _CHUNKS),
    "--scheduling-policy": ("fcfs|priority", "requests go by their `priority`, and then by their arrival"),
    "--swap-space": (r"[\d.]+", "a preempted request is computed again"),
    "--cpu-offload-gb": (r"[0.]+", "weights stay on the device"),
    "--kv-cache-dtype": ("auto", "the KV cache has the format of --dtype"),
    "--tokenizer-mode": ("auto|hf", "the tokenizer is the model's fast one of Hugging Face"),
    "--task": ("auto|generate", _GENERATES),
    "--runner": ("auto|generate", _GENERATES),
    "--convert": ("auto|none", _GENERATES),
    "--max-logprobs": ("20", "a request may ask for up to 20 logprobs of a token"),
    "--chat-template-content-format": ("auto|openai", "a chat template gets content in the form that the message has"),
    "--interleave-mm-strings": (None, "media stay where the message has them"),
    "--skip-mm-profiling": (None, "on CUDA the memory that media need is measured at start"),
    "--response-role": ("assistant", "answers are of the role assistant"),
    "--enable-prompt-tokens-details": (None, "the answer's usage always has them"),
    "--uvicorn-log-level": (r"\w+", "--log-level is for all lines of the log"),
    "--disable-uvicorn-access-log": (None, "requests that succeed are logged with --enable-log-requests only"),
    "--enable-expert-parallel": (None, "a dense model has no experts, and others are not served"),
    "--max-log-len": (r"\d+", "prompts are never logged"),
}


def no_effect_line(flag: str, value: Any) -> str:
    """The line of the log on a flag of `NO_EFFECT` with its value as typed or in a file; True: without one.

    Raises:
        ConfigError: the value asks for more than there is.
    """
    accepted, why = NO_EFFECT[flag]
    given = flag if value is True else f"{flag} {value}"
    if not re.fullmatch(accepted or "True", str(value)):
        raise ConfigError(f"{given}: not supported: {why}")
    return f"{given}: accepted, has no effect: {why}"
