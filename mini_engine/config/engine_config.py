"""All options of a server: one field each, in the groups that `--help` and docs/config.md show."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal, get_type_hints

from mini_engine.config.decode_limits import MOST_FRAMES_KEPT, DecodeLimits
from mini_engine.config.options import ConfigError, Setting, options_of, parse_length, parse_limits, setting_of

BUNDLED_NAME = "mini-engine-demo"  # what clients call it
BUNDLED_MODEL = str(Path(__file__).parent.parent / "demo" / "weights")

IPC_GPU_GIB = 4.0  # --mm-ipc-gpu-memory-gb where it is not given
SLOTS_PART = 4  # a quarter of that memory is for patches in transfer
STAGING_SLOTS = 8  # messages in transfer from an API server to an engine at once: a part of that quarter for each

# Tokens per step where no flag says, by kind of device: enough that a step of a large model is not dominated by its
# fixed cost, and few enough for a short time between tokens.
STEP_TOKENS = {"cpu": 512, "cuda": 2048}
# Sequences per step, likewise. On CUDA 64 would leave much of a large card unused; but each sequence of a model with
# recurrent states takes tens of MiB from the start.
STEP_SEQUENCES, STEP_SEQUENCES_CUDA = 64, 256

AttentionBackendName = Literal["auto", "triton", "sdpa"]
Dtype = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]
TensorIpc = Literal["auto", "torch_shm", "direct_rpc"]

_model, _processes, _server, _security, _logging = map(
    options_of, ("Model", "Processes", "Server", "Security", "Logging")
)
_scheduling, _caches = map(options_of, ("Scheduling", "Caches of the workers"))
_media, _sources, _limits = map(options_of, ("Media", "Media sources", "Media limits"))
_admission, _transport = map(options_of, ("Admission", "Media cache and transport"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of a server. `validate` has passed for every instance that leaves `cli.settle`."""

    model: str = _model(
        BUNDLED_MODEL, "Directory or hub name.", unset="the bundled model", positional=True, metavar="MODEL"
    )
    served_model_name: list[str] = _model(
        [], "Model names that clients may use.", metavar="NAME", unset=f"MODEL, or {BUNDLED_NAME} for the bundled one"
    )
    revision: str | None = _model(None, "Branch, tag or commit of a hub model.", unset="the hub's main branch")
    trust_remote_code: bool = _model(False, "Allow the hub model's own processor code to run.")
    chat_template: str | None = _model(None, "Jinja chat template to use.", unset="the model's", metavar="FILE")
    tool_call_parser: Literal["auto", "hermes"] = _model(
        "auto", "Format of tool calls in answers: `hermes` (JSON in `<tool_call>`), or `auto`: by the chat template."
    )
    reasoning_parser: Literal["auto", "qwen3", "none"] = _model(
        "auto", "Format of thoughts in answers: `qwen3` (`<think>`), `none`, or `auto`: by the chat template."
    )
    generation_config: str = _model(
        "auto", "Source of the defaults of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens: "
        "`auto` (the model's generation_config.json), `vllm` (none), or a directory with such a file.",
        metavar="SOURCE",
    )  # fmt: skip
    dtype: Dtype = _model(
        "auto", "Data type of weights and activations. `auto`: the checkpoint's; `float`: float32; `half`: float16."
    )
    load_format: Literal["auto", "safetensors", "dummy"] = _model(
        "auto", "Format of the weights: `safetensors`, `auto` (the same), or `dummy` (random, without weight files)."
    )
    device: Literal["auto", "cpu", "cuda"] = _model("auto", "Device of the workers. `auto`: CUDA if available.")
    attention_backend: AttentionBackendName = _model(
        "auto", "Attention backend: `triton` (paged), `sdpa` (torch), or `auto`: triton on CUDA, sdpa on the CPU."
    )
    enforce_eager: bool = _model(False, "Run decode steps without CUDA graphs.")
    seed: int = _model(0, "Seed of the server's random number generators.")
    max_model_len: int | None = _model(
        None, "Maximum tokens of prompt and output together.", parse_text=parse_length, minimum=1,
        unset="auto: the model's context length, or less if the KV cache holds less",
    )  # fmt: skip

    tensor_parallel_size: int = _processes(1, "Tensor parallel workers per engine.", short="-tp", minimum=1)
    mm_encoder_tp_mode: Literal["weights", "data"] = _processes(
        "weights", "Parallelism of the vision tower: `weights` splits its layers, `data` splits the images and frames."
    )
    distributed_backend: Literal["auto", "gloo", "nccl", "shm"] = _processes(
        "auto", "Backend of collectives between workers: `nccl`, `shm` (shared memory), `gloo`, or `auto`: NCCL on "
        "CUDA, shared memory on the CPU. With `gloo`, workers may share CUDA devices (slow, for tests).",
    )  # fmt: skip
    data_parallel_size: int = _processes(
        1, "Data parallel engines, each with its own copy of the model.", short="-dp", minimum=1, maximum=64
    )
    api_server_count: int = _processes(1, "API server processes.", short="-asc", minimum=1, maximum=64)
    collective_timeout: float = _processes(
        60.0, "Seconds until a collective fails, an unresponsive engine or API server is killed, or a request fails "
        "whose media tensors have not reached the workers (30 at most).", minimum=1, maximum=86400,
    )  # fmt: skip
    startup_timeout: float = _processes(600.0, "Seconds until all processes must be ready.", minimum=1, maximum=86400)
    health_timeout: float = _processes(
        10.0, "Seconds until a ping or step that is not finished makes `/health` 503.", minimum=0.1, maximum=3600
    )
    shutdown_timeout: float = _processes(
        30.0, "Seconds for running requests after SIGTERM; 0: abort them, as SIGINT does.", minimum=0, maximum=86400
    )
    restart_engine: int = _processes(
        0, "Maximum engine restarts in a row; 0: the server exits. The flag alone: 3.", minimum=0, bare="3", metavar="N"
    )

    host: str = _server("0.0.0.0", "Address to listen on; `::` is all addresses, of IPv6 and IPv4.")
    port: int = _server(8000, "Port to listen on; 0: a free one.", minimum=0, maximum=65535)
    uds: str | None = _server(None, "Unix socket to listen on, not --host and --port.", metavar="PATH", unset="none")
    root_path: str = _server("", "Path prefix behind a reverse proxy, such as /engine.", unset="none")
    max_connections: int | None = _server(
        None, "Maximum connections per API server, idle ones included; then 503. --max-num-queued-reqs limits load.",
        minimum=1, unset="half of the open files limit",
    )  # fmt: skip
    timeout_client: float = _server(
        30.0, "Seconds in which a client must send the request headers, send the body (a second more for each 16 KiB), "
        "or read some of the response, before its connection is closed.", minimum=0.1, maximum=3600,
    )  # fmt: skip
    timeout_keep_alive: int = _server(
        75, "Seconds until an idle connection is closed; more than the idle time-outs of clients and proxies.",
        minimum=1, maximum=3600,
    )  # fmt: skip

    api_key: list[str] = _security(
        [], "Keys; clients must send one in the header `Authorization: Bearer KEY`, except to `/health`, `/live` "
        "and the files of the playground. May be repeated. `ps` shows a flag, but not the environment variable.",
        metavar="KEY", unset="no key required", secret=True,
    )  # fmt: skip
    allowed_hosts: list[str] = _security(
        [], "Host names, such as engine.example or *.example, that clients may ask for in the header `Host`, beside IP "
        "addresses, names without a dot, in .localhost, .local and .internal, and --host; `*`: any. Against web pages "
        "that have their own name resolve to this server (DNS rebinding).", metavar="NAME",
        unset="any with an API key, TLS or --uds",
    )  # fmt: skip
    ssl_keyfile: str | None = _security(None, "TLS private key; with --ssl-certfile.", metavar="FILE", unset="no TLS")
    ssl_certfile: str | None = _security(None, "TLS certificate; with --ssl-keyfile.", metavar="FILE", unset="no TLS")
    disable_playground: bool = _security(False, "Do not serve the playground, a page at `GET /`.")
    allowed_origins: list[str] = _security([], "CORS: allowed origins; `*`: all.", metavar="ORIGIN", unset="none")
    allowed_methods: list[str] = _security(["*"], "CORS: allowed methods.", metavar="METHOD", unset="all")
    allowed_headers: list[str] = _security(["*"], "CORS: allowed headers.", metavar="HEADER", unset="all")
    allow_credentials: bool = _security(False, "CORS: allow credentials.")

    log_level: Literal["debug", "info", "warning", "error"] = _logging("info", "Minimum severity of log lines.")
    log_format: Literal["text", "json"] = _logging("text", "Format of log lines: text, or one JSON object per line.")
    enable_log_requests: bool = _logging(
        False, "Log id, status and duration of each request.", twins={"--disable-log-requests": False}
    )
    disable_log_stats: bool = _logging(False, "Do not log statistics every ten seconds while requests run.")

    max_num_seqs: int | None = _scheduling(
        None, "Maximum sequences per step.", minimum=1,
        unset=f"{STEP_SEQUENCES_CUDA} on CUDA; {STEP_SEQUENCES} on the CPU and for models with recurrent states",
    )  # fmt: skip
    max_num_batched_tokens: int | None = _scheduling(
        None, "Maximum tokens per step; longer prompts are prefilled in chunks.", minimum=1,
        unset="512 on the CPU, 2048 on CUDA",
    )  # fmt: skip
    long_prefill_token_threshold: int | None = _scheduling(
        None, "Maximum tokens of one prompt per step while other prompts wait; 0: no limit.", minimum=0,
        unset="half of --max-num-batched-tokens",
    )  # fmt: skip
    max_num_encoder_input_tokens: int | None = _scheduling(
        None, "Maximum media tokens encoded per step.", minimum=1, unset="--max-num-batched-tokens"
    )
    ignore_priority: bool = _scheduling(
        False, "Ignore the `priority` of requests. Use it where all clients share an API key or a proxy's address."
    )
    async_scheduling: bool = _scheduling(True, "Schedule the next step while the workers run the current one.")

    enable_prefix_caching: bool = _caches(True, "Reuse KV blocks of earlier requests with the same prefix.")
    block_size: int = _caches(16, "Tokens per block of the KV cache.", minimum=1)
    kv_cache_memory_bytes: int | None = _caches(
        None, "Size of each worker's KV cache; no more than --max-num-seqs sequences of --max-model-len tokens fill.",
        minimum=1, unset="1G on the CPU, --gpu-memory-utilization on CUDA",
    )  # fmt: skip
    gpu_memory_utilization: float = _caches(
        0.9, "Fraction of a CUDA device's memory for its workers: weights, media, the largest step, and the KV cache, "
        "which gets the rest. CUDA graphs are not counted: leave room for them. No effect on the CPU.",
        minimum=0.05, maximum=1.0,
    )  # fmt: skip
    num_gpu_blocks_override: int | None = _caches(
        None, "Number of KV cache blocks, on any device.", minimum=1, unset="as many as fit into the memory"
    )
    state_cache_memory_bytes: int | None = _caches(
        None, "Size of the prefix cache's snapshots of recurrent states on each worker, a part of its KV cache's "
        "memory; for models with such states.", minimum=0, unset="a quarter of that memory",
    )  # fmt: skip
    state_snapshot_interval: int | None = _caches(
        None, "Tokens of a prompt between two such snapshots, a multiple of --block-size; there are others at the end "
        "of each media item, prompt and answer.", minimum=1, unset="the KV cache's tokens / snapshots, at least 256",
    )  # fmt: skip
    encoder_cache_tokens: int = _caches(
        65536, "Size of the encoder cache in media tokens; also the maximum of one prompt.", minimum=1
    )

    limit_mm_per_prompt: dict[str, Any] = _media(
        {}, 'Maximum items of each modality per prompt, such as \'{"video": 1, "image": 4}\' or video=1,image=4.',
        parse_text=parse_limits, metavar="JSON", unset="no limit",
    )  # fmt: skip
    media_io_kwargs: dict[str, dict[str, Any]] = _media(
        {}, 'Sampling of videos, such as \'{"video": {"num_frames": 10}}\' or \'{"video": {"fps": 2}}\'.',
        metavar="JSON", unset="the model's own sampling",
    )  # fmt: skip
    mm_processor_kwargs: dict[str, Any] = _media(
        {}, 'Arguments of the model\'s Hugging Face processor, such as \'{"size": {"shortest_edge": 3136, '
        '"longest_edge": 50176}}\'.', metavar="JSON", unset="the model's own",
    )  # fmt: skip
    allow_partial_video: bool = _media(False, "Accept truncated or damaged videos, with a warning in the response.")

    allowed_local_media_path: str | None = _sources(
        None, "Directory from which `file://` media may be read.", metavar="DIRECTORY", unset="none"
    )
    allowed_media_domains: list[str] = _sources(
        [], "Hosts from which `http(s)://` media may be fetched, also after a redirect. All addresses of a host name "
        "must be public, or in networks that are listed too, such as 10.0.0.0/8 or fd00::/8. URLs may name a listed "
        "address, such as 127.0.0.1:8080, but no address of a listed network.", metavar="HOST[:PORT]", unset="none",
    )  # fmt: skip
    media_fetch_timeout: float = _sources(30.0, "Seconds to fetch an `http(s)://` item.", minimum=0.1, maximum=3600)

    max_media_bytes: int = _limits(  # at most what Linux writes at once
        256 << 20, "Maximum size of an encoded image or video.", minimum=1, maximum=(2 << 30) - 4096
    )
    max_image_pixels: int = _limits(DecodeLimits.max_image_pixels, "Maximum pixels of an image.", minimum=1)
    max_frame_pixels: int = _limits(DecodeLimits.max_frame_pixels, "Maximum pixels of a video frame.", minimum=1)
    max_video_seconds: float = _limits(DecodeLimits.max_video_seconds, "Maximum duration of a video.", minimum=0.1)
    max_video_frames: int = _limits(DecodeLimits.max_video_frames, "Maximum frames of a video file.", minimum=1)
    max_video_frames_kept: int = _limits(
        DecodeLimits.max_video_frames_kept, "Maximum frames sampled from a video.", minimum=1, maximum=MOST_FRAMES_KEPT
    )
    max_video_pixels_kept: int = _limits(
        DecodeLimits.max_video_pixels_kept, "Maximum pixels of all sampled frames; larger ones are scaled.", minimum=1
    )
    media_decode_timeout: float = _limits(
        DecodeLimits.media_decode_timeout, "Seconds to decode an image or video.", minimum=0.1, maximum=3600
    )
    media_decoder_memory: int = _limits(
        DecodeLimits.media_decoder_memory, "Maximum memory of a decoder process for one image or video, beyond its own "
        "size, the encoded file and the sampled frames.", minimum=64 << 20,
    )  # fmt: skip

    maximum_concurrent_videos: int = _admission(
        64,
        "Maximum images and videos per API server that are decoded, processed or sent; others are queued.",
        minimum=1,
    )
    max_num_queued_reqs: int = _admission(
        4096, "Maximum unfinished requests per API server; further ones are refused with 429. Each choice counts, of "
        "all prompts.", minimum=1,
    )  # fmt: skip
    max_inflight_media_gb: float = _admission(
        4.0, "Maximum GiB per API server of encoded media, reserved before the download and held until the request is "
        "sent to an engine. Decoded frames count until they are processed. Request bodies in transfer may take as much "
        "again. A request that does not fit beside others is refused with 429.", minimum=0.001,
    )  # fmt: skip
    max_request_bytes: int = _admission(
        1 << 30, "Maximum size of a request body; media in `data:` URLs take 4/3 of their size.", minimum=1
    )
    max_text_bytes: int = _admission(
        4 << 20, "Maximum size of a request body without the base64 data of its images and videos.", minimum=1
    )

    mm_processor_cache_type: Literal["auto", "lru", "shm"] = _transport(
        "auto", "Cache of processed media: `shm` (in shared memory, once per engine), `lru` (a copy in each worker), "
        "or `auto`: `shm`, unless --mm-processor-device is `cuda`.",
    )  # fmt: skip
    mm_processor_cache_gb: float | None = _transport(
        None, "Size of that cache in GiB: of all engines together (shm), or of each worker (lru); 0 disables it.",
        minimum=0, unset="4, or a quarter of the free memory if that is less",
    )  # fmt: skip
    mm_shm_cache_max_object_size_mb: int = _transport(
        128, "Maximum size of an item in the shm cache, in MiB; a larger item is sent uncached.", minimum=1
    )
    mm_tensor_ipc: TensorIpc = _transport(
        "auto", "Transport of media tensors that are not in the shm cache: `torch_shm` (shared memory), `direct_rpc` "
        "(copied through a socket), or `auto`: the first that passes its probe.",
        twins={"--enable-multimodal-tensor-ipc": "torch_shm", "--disable-multimodal-tensor-ipc": "direct_rpc"},
    )  # fmt: skip
    mm_ipc_memory_bytes: int = _transport(
        1 << 30, "Maximum memory per API server for tensors in transfer to the workers, by any transport, in pages of "
        "64 KiB; further requests wait.", minimum=1 << 20,
    )  # fmt: skip
    mm_processor_device: Literal["cpu", "cuda"] = _transport(
        "cpu", "Device on which frames become patches; from `cuda` they reach the workers without a copy on the host."
    )
    mm_ipc_gpu_memory_gb: float | None = _transport(
        None, "Maximum memory of CUDA devices for such patches, in GiB, of all API servers together. It and 1 GiB per "
        "API server for the CUDA context are taken off the KV cache. Three quarters are for the processor: an item "
        "that needs more is processed on the CPU. A quarter is divided into eight staging slots per API server and "
        "engine: a prompt that finds no free slot, or is too large for one, is copied through the host.",
        unset="4 with --mm-processor-device cuda", minimum=0.1,
    )  # fmt: skip

    def validate(self) -> None:
        """Raises ConfigError for the first value that does not fit the others, or names what does not exist."""
        narrowed = (self.allowed_methods, self.allowed_headers, self.allow_credentials) != (["*"], ["*"], False)
        local, on_cuda = self.allowed_local_media_path, self.mm_processor_device == "cuda"
        rules: list[tuple[object, str]] = [
            (not all(self.api_key), "--api-key: empty; omit the flag to require none"),
            (self.uds is not None and (self.host, self.port) != (EngineConfig.host, EngineConfig.port),
             "--uds: a unix socket has neither --host nor --port; keep one of them"),
            (any(not name or {"/", ":"} & set(name) for name in self.allowed_hosts),
             "--allowed-hosts: names only, not empty, without scheme and port"),
            ((self.ssl_keyfile is None) != (self.ssl_certfile is None), "--ssl-keyfile, --ssl-certfile: set both"),
            (narrowed and not self.allowed_origins,
             "--allowed-methods, --allowed-headers and --allow-credentials need --allowed-origins"),
            (local is not None and not os.path.isdir(local),
             f"--allowed-local-media-path: {local} is not a directory"),
            ((self.state_snapshot_interval or 0) % self.block_size,
             f"--state-snapshot-interval: not a multiple of --block-size, {self.block_size}"),
            (self.media_io_kwargs.keys() - {"video"}, "--media-io-kwargs: only `video` takes arguments"),
            *((modality not in ("image", "video", "audio") or not isinstance(limit, int) or limit < 0,
               f"--limit-mm-per-prompt: {modality!r}: {limit!r} is not one of image, video with a count >= 0")
              for modality, limit in self.item_limits.items()),
            (self.mm_ipc_gpu_memory_gb is not None and not on_cuda,
             "--mm-ipc-gpu-memory-gb needs --mm-processor-device cuda"),
            (on_cuda and self.device == "cpu",
             "--mm-processor-device: cuda needs workers on CUDA, not --device cpu; choose cpu"),
            (on_cuda and self.mm_processor_cache_type == "shm",
             "--mm-processor-device: no CUDA tensors in the shm cache; choose --mm-processor-cache-type lru or auto"),
            (on_cuda and self.mm_tensor_ipc == "direct_rpc",
             "--mm-processor-device: direct_rpc carries no CUDA tensors; choose --mm-tensor-ipc auto"),
        ]  # fmt: skip
        for broken, message in rules:
            if broken:
                raise ConfigError(message)

    @property
    def served_names(self) -> list[str]:
        """Names by which clients may ask for the model; the first is the one in responses."""
        default = BUNDLED_NAME if self.model == BUNDLED_MODEL else self.model
        return self.served_model_name or [default]

    @property
    def item_limits(self) -> dict[str, int]:
        """Most items in one prompt, by modality; vLLM's `{"image": {"count": 4}}` is 4."""
        limits = self.limit_mm_per_prompt.items()
        counts = {name: one.get("count", ...) if isinstance(one, dict) else one for name, one in limits}
        return {name: count for name, count in counts.items() if count is not ...}

    def sequence_tokens(self, made_for: int) -> int:
        """Most tokens of prompt and output of a model that was made for `made_for`, unless the KV cache holds less."""
        return self.max_model_len or made_for

    def step_sequences(self, device: str, recurrent: bool) -> int:
        """Most sequences of one step of workers on `device`, "cpu" or "cuda"; `recurrent`: they have states."""
        large = device == "cuda" and not recurrent
        return self.max_num_seqs or (STEP_SEQUENCES_CUDA if large else STEP_SEQUENCES)

    def step_tokens(self, device: str) -> int:
        """Most tokens computed in one step of workers on `device`, "cpu" or "cuda"."""
        return self.max_num_batched_tokens or STEP_TOKENS[device]

    def step_media_tokens(self, device: str) -> int:
        """Most media tokens encoded in one step of workers on `device`, "cpu" or "cuda"."""
        return self.max_num_encoder_input_tokens or self.step_tokens(device)


def fields() -> list[Setting]:
    """The settings in their order; those of a group are next to each other."""
    types = get_type_hints(EngineConfig)
    return [setting_of(field, types[field.name]) for field in dataclasses.fields(EngineConfig)]


def groups() -> dict[str, list[Setting]]:
    """The settings by group, in their order."""
    found: dict[str, list[Setting]] = {}
    for setting in fields():
        found.setdefault(setting.group, []).append(setting)
    return found
