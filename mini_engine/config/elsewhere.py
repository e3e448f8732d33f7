"""Flags of vLLM's server that this one does not have, each with what there is in its place."""

from __future__ import annotations

_CHUNKS = "prompts longer than --max-num-batched-tokens are always computed in chunks"
_LORA = "not supported: LoRA adapters; merge the adapter into the weights"
_ONE_HOST = "not supported: all processes run on one host"
_SPECULATION = "not supported: speculative decoding"
_STRUCTURE = "not supported: structured output"
_SWAP = "not supported: weights and KV cache stay on the device; a preempted request is computed again"
_TOOLS = "not supported: tool calls"
_FILES = "not supported: it is read from the directory of MODEL; put the files there"
_LAYERS = "not supported: layers are not dealt out to workers; --tensor-parallel-size shares out each of them"
_QUANTISED = "not supported: quantised weights; --dtype has the formats there are"

ELSEWHERE = {
    "--model": "the model is the first argument, without a flag: serve.py MODEL",
    "--pipeline-parallel-size": _LAYERS,
    "-pp": _LAYERS,
    "--enable-expert-parallel": "not supported: mixtures of experts",
    "--distributed-executor-backend": "workers are always processes of this host; leave it out",
    "--data-parallel-address": _ONE_HOST,
    "--data-parallel-size-local": _ONE_HOST,
    "--headless": _ONE_HOST,
    "--nnodes": _ONE_HOST,
    "--node-rank": _ONE_HOST,
    "--enable-chunked-prefill": f"{_CHUNKS}; leave it out",
    "--no-enable-chunked-prefill": f"not supported: {_CHUNKS}",
    "--scheduling-policy": "requests always go by their `priority`, and then by their arrival; leave it out",
    "--swap-space": _SWAP,
    "--cpu-offload-gb": _SWAP,
    "--kv-transfer-config": "not supported: the KV cache of an engine is its own",
    "--kv-cache-dtype": "not supported: the KV cache has the format of --dtype",
    "--quantization": _QUANTISED,
    "-q": _QUANTISED,
    "--speculative-config": _SPECULATION,
    "--speculative-model": _SPECULATION,
    "--num-speculative-tokens": _SPECULATION,
    "--compilation-config": "not supported: --enforce-eager is all there is to choose",
    "-O": "not supported: --enforce-eager is all there is to choose",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--tool-call-parser": _TOOLS,
    "--enable-auto-tool-choice": _TOOLS,
    "--reasoning-parser": "not supported: reasoning is not told from the answer",
    "--guided-decoding-backend": _STRUCTURE,
    "--structured-outputs-config": _STRUCTURE,
    "--tokenizer": _FILES,
    "--tokenizer-mode": _FILES,
    "--hf-overrides": _FILES,
    "--task": "MODEL always generates text; leave it out",
    "--runner": "MODEL always generates text; leave it out",
    "--interleave-mm-strings": "media always stand where the message has them; leave it out",
    "--video-pruning-rate": "not supported: all of a video counts; --media-io-kwargs has fewer frames taken",
    "--disable-mm-preprocessor-cache": "use --mm-processor-cache-gb 0",
    "--override-generation-config": "not supported: --generation-config names a directory with such a file",
    "--response-role": "answers are always of the role assistant",
    "--enable-prompt-tokens-details": "the answer's usage always has them; leave it out",
    "--uvicorn-log-level": "use --log-level",
    "--disable-uvicorn-access-log": "requests are logged with --enable-log-requests only; leave it out",
    "--max-log-len": "what requests say is never logged; leave it out",
    "--otlp-traces-endpoint": "not supported: traces; /metrics has histograms of each stage of a request",
}
