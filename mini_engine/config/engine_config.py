"""All options of a server: one field each, in the groups that `--help` and docs/config.md show."""

import dataclasses
import functools
import ipaddress
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mini_engine.config.options import ConfigError, Setting, options_of, parse_length, parse_limits, settings_of

BUNDLED_NAME = "mini-engine-demo"  # what clients call it
BUNDLED_MODEL = str(Path(__file__).parent.parent / "demo" / "weights")

IPC_GPU_GIB = 4.0  # --mm-ipc-gpu-memory-gb where it is not given
SLOTS_PART = 4  # a quarter of that memory is for patches in transfer
STAGING_SLOTS = 8  # messages in transfer from an API server to an engine at once: a part of that quarter for each

# Tokens per step where no flag says, by kind of device: enough that a step of a large model is not dominated by its
# fixed cost, and few enough for a short time between tokens.
STEP_TOKENS = {"cpu": 512, "cuda": 2048}
# Seconds of prompts and media in a step with decodes, likewise.
STEP_SECONDS = {"cpu": 0.5, "cuda": 0.0}
# Sequences per step, likewise. On CUDA 64 would leave much of a large card unused; but each sequence of a model with
# recurrent states takes tens of MiB from the start.
STEP_SEQUENCES, STEP_SEQUENCES_CUDA = 64, 256

# Bytes of the KV caches of all engines on the CPU where no flag says, and how many of them divide it: an eighth holds a
# long prompt of a small model.
CPU_CACHE_BYTES, CPU_CACHE_PARTS = 1 << 30, 8
CPU_SEQUENCE_TOKENS = 65536  # most tokens of a request on the CPU where no flag says: a prefill of an hour
ENCODER_TOKENS = 65536  # of the encoder cache, likewise

MOST_FRAMES_KEPT = 10_000  # by the sampling, whatever the flag: a decoder lists the frames in a datagram of 200 kB

# The keys of `video` in --media-io-kwargs, and those of --mm-processor-kwargs. `media/settings.py` has their values.
VIDEO_ARGUMENTS = ("num_frames", "fps", "max_frames", "min_frames", "start", "end", "frame_factor")
SIZE_ARGUMENTS = ("size", "min_pixels", "max_pixels", "cap_pixels_per_frame", "do_sample_frames", "resample")
PROCESSOR_ARGUMENTS = (*SIZE_ARGUMENTS, "max_video_tokens", *VIDEO_ARGUMENTS)

AttentionBackendName = Literal["auto", "triton", "sdpa"]
Dtype = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]
TensorIpc = Literal["auto", "torch_shm", "direct_rpc"]

_model, _processes, _server = map(options_of, ("Model", "Processes", "Server"))
_security, _logging, _scheduling = map(options_of, ("Security", "Logging", "Scheduling"))
_caches, _media, _sources = map(options_of, ("Caches of the workers", "Media", "Media sources"))
_limits, _admission, _transport = map(options_of, ("Media limits", "Admission", "Media cache and transport"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of a server, each with its help below. `validate` has passed for every instance that leaves
    `cli.settle`."""

    model: str = _model(BUNDLED_MODEL, unset="the bundled model", positional=True, metavar="MODEL")
    """Directory or hub name."""
    served_model_name: list[str] = _model([], metavar="NAME", unset=f"MODEL, or {BUNDLED_NAME} for the bundled one")
    """Model names that clients may use."""
    revision: str | None = _model(None, unset="the hub's main branch")
    """Branch, tag or commit of a hub model."""
    trust_remote_code: bool = _model(False)
    """Allow the hub model's own processor code to run."""
    chat_template: str | None = _model(None, unset="the model's", metavar="FILE")
    """File with a Jinja chat template to use."""
    tool_call_parser: Literal["auto", "hermes", "qwen3_xml", "qwen3_coder"] = _model("auto")
    """Format of tool calls in answers: `hermes` (JSON in `<tool_call>`), `qwen3_xml` or `qwen3_coder` (`<function=`),
    or `auto`: by the chat template."""
    reasoning_parser: Literal["auto", "qwen3", "none"] = _model("auto")
    """Format of thoughts in answers: `qwen3` (`<think>`), `none`, or `auto`: by the chat template."""
    generation_config: str = _model("auto", metavar="SOURCE")
    """Source of the defaults of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens: `auto` (the
    model's generation_config.json), `vllm` (none), or a directory with such a file."""
    runner: Literal["auto", "generate", "pooling"] = _model("auto")
    """What to make of prompts: text (`generate`), embeddings or scores (`pooling`), or `auto`: `pooling` with --convert
    or for a checkpoint with a modules.json, as Qwen3-VL-Embedding and Qwen3-VL-Reranker have."""
    convert: Literal["auto", "embed", "classify"] = _model("auto")
    """With --runner pooling: embeddings (`embed`), scores of documents (`classify`), or `auto`: `classify` if the
    checkpoint's modules.json names no pooling."""
    dtype: Dtype = _model("auto")
    """Data type of weights and activations. `auto`: the checkpoint's; `float`: float32; `half`: float16."""
    quantization: Literal["none", "int8", "int4"] = _model(
        "none", short="-q", remedy="a quantised checkpoint needs no flag"
    )
    """Quantise the decoder of a dense checkpoint while it is read: to 8 bits with a scale per output (`int8`), or to 4
    with one per 128 inputs (`int4`). Checkpoints that are quantised need no flag."""
    quantize_head: Literal["int8", "none"] = _model("int8")
    """Format of the output head where the decoder is quantised and the checkpoint's head is not."""
    load_format: Literal["auto", "safetensors", "dummy"] = _model("auto")
    """Format of the weights: `safetensors`, `auto` (the same), or `dummy` (random, without weight files)."""
    device: Literal["auto", "cpu", "cuda"] = _model("auto")
    """Device of the workers. `auto`: CUDA if available."""
    attention_backend: AttentionBackendName = _model("auto")
    """Attention backend: `triton` (paged), `sdpa` (torch), or `auto`: triton on CUDA, sdpa on the CPU."""
    enforce_eager: bool = _model(False)
    """Run decode steps without CUDA graphs."""
    seed: int = _model(0)
    """Seed of the server's random number generators."""
    max_model_len: int | None = _model(
        None,
        parse_text=parse_length,
        minimum=1,
        unset="auto: the model's context length, on the CPU 65536 at most, or less if the KV cache holds less",
    )
    """Maximum tokens of prompt and output together."""

    tensor_parallel_size: int = _processes(1, short="-tp", minimum=1)
    """Tensor parallel workers per engine."""
    mm_encoder_tp_mode: Literal["weights", "data"] = _processes("weights")
    """Parallelism of the vision tower: `weights` splits its layers, `data` splits the images and frames."""
    distributed_backend: Literal["auto", "gloo", "nccl", "shm"] = _processes("auto")
    """Backend of collectives between workers: `nccl`, `shm` (shared memory), `gloo`, or `auto`: NCCL on CUDA, shared
    memory on the CPU. With `gloo`, workers may share CUDA devices (slow, for tests)."""
    data_parallel_size: int | None = _processes(
        None,
        short="-dp",
        parse_text=parse_length,
        minimum=1,
        maximum=64,
        unset="auto: on the CPU by the model's size and the cores, 1 on CUDA",
    )
    """Data parallel engines, each with its own copy of the model."""
    api_server_count: int = _processes(1, short="-asc", minimum=1, maximum=64)
    """API server processes."""
    collective_timeout: float = _processes(300.0, minimum=1, maximum=86400)
    """Seconds until a collective fails, an unresponsive engine or API server is killed, or a worker ends whose receiver
    of media tensors hangs."""
    startup_timeout: float = _processes(600.0, minimum=1, maximum=86400)
    """Seconds until all processes must be ready."""
    health_timeout: float = _processes(10.0, minimum=0.1, maximum=3600)
    """Seconds until a ping or step that is not finished makes `/health` 503."""
    shutdown_timeout: float = _processes(30.0, minimum=0, maximum=86400)
    """Seconds for running requests after SIGTERM or SIGHUP; 0: abort them, as SIGINT does."""
    restart_engine: int = _processes(0, minimum=0, bare="3", metavar="N")
    """Maximum engine restarts in a row; 0: the server exits. The flag alone: 3."""
    debug: bool = _processes(False)
    """For `breakpoint()`: all processes share the terminal's input, one engine starts, and time-outs that are not given
    are as long as they can be, an hour or a day."""

    host: str = _server("0.0.0.0")
    """Address to listen on; `::` is all addresses, of IPv6 and IPv4."""
    port: int = _server(8000, minimum=0, maximum=65535)
    """Port to listen on; 0: a free one."""
    uds: str | None = _server(None, metavar="PATH", unset="none")
    """Unix socket to listen on, not --host and --port."""
    root_path: str = _server("", unset="none")
    """Path prefix behind a reverse proxy, such as /engine."""
    max_connections: int | None = _server(None, minimum=1, unset="half of the open files limit")
    """Maximum connections per API server, idle ones included; then 503. --max-num-queued-reqs limits load."""
    timeout_client: float = _server(30.0, minimum=0.1, maximum=3600)
    """Seconds in which a client must send the request headers, send the body (a second more for each 16 KiB), or read
    some of the response, before its connection is closed."""
    timeout_keep_alive: int = _server(75, minimum=1, maximum=3600)
    """Seconds until an idle connection is closed; more than the idle time-outs of clients and proxies."""

    api_key: list[str] = _security([], metavar="KEY", unset="no key required", secret=True)
    """Keys; clients must send one in the header `Authorization: Bearer KEY`, except to `/health`, `/live` and the files
    of the playground. May be repeated. `ps` shows a flag, but not the environment variable."""
    allowed_hosts: list[str] = _security([], metavar="NAME", unset="any with an API key, TLS or --uds")
    """Host names, such as engine.example or *.example, that clients may ask for in the header `Host`, beside IP
    addresses, names without a dot, in .localhost, .local and .internal, the machine's, and --host; `*`: any. Against
    web pages that have their own name resolve to this server (DNS rebinding)."""
    forwarded_allow_ips: list[str] = _security(["127.0.0.1"], metavar="ADDRESS", unset="127.0.0.1")
    """Addresses and networks, such as 10.0.0.0/8, of reverse proxies, whose header `X-Forwarded-For` says which client
    a request is from; `*`: any, also at a Unix socket."""
    ssl_keyfile: str | None = _security(None, metavar="FILE", unset="no TLS")
    """TLS private key; with --ssl-certfile."""
    ssl_certfile: str | None = _security(None, metavar="FILE", unset="no TLS")
    """TLS certificate; with --ssl-keyfile."""
    disable_playground: bool = _security(False)
    """Do not serve the playground, a page at `GET /`."""
    allowed_origins: list[str] = _security([], metavar="ORIGIN", unset="none")
    """CORS: allowed origins; `*`: all."""
    allowed_methods: list[str] = _security(["*"], metavar="METHOD", unset="all")
    """CORS: allowed methods."""
    allowed_headers: list[str] = _security(["*"], metavar="HEADER", unset="all")
    """CORS: allowed headers."""
    allow_credentials: bool = _security(False)
    """CORS: allow credentials."""

    log_level: Literal["debug", "info", "warning", "error"] = _logging("info")
    """Minimum severity of log lines."""
    log_format: Literal["text", "json"] = _logging("text")
    """Format of log lines: text, or one JSON object per line."""
    enable_log_requests: bool = _logging(False, twins={"--disable-log-requests": False})
    """Log each request at its end: id, client, model, status, tokens and duration."""
    log_slow_requests: float | None = _logging(None, minimum=0, metavar="SECONDS", unset="no")
    """Log each request that took so long, as --enable-log-requests, with the seconds of each of its stages."""
    disable_log_stats: bool = _logging(False)
    """Do not log statistics every ten seconds while requests run."""

    max_num_seqs: int | None = _scheduling(
        None,
        minimum=1,
        unset=f"{STEP_SEQUENCES_CUDA} on CUDA; {STEP_SEQUENCES} on the CPU and for models with recurrent states",
    )
    """Maximum sequences per step."""
    max_num_batched_tokens: int | None = _scheduling(None, minimum=1, unset="512 on the CPU, 2048 on CUDA")
    """Maximum tokens per step; longer prompts are prefilled in chunks."""
    long_prefill_token_threshold: int | None = _scheduling(None, minimum=0, unset="half of --max-num-batched-tokens")
    """Maximum tokens of one prompt per step while other prompts wait; 0: no limit."""
    max_num_encoder_input_tokens: int | None = _scheduling(None, minimum=1, unset="--max-num-batched-tokens")
    """Maximum media tokens encoded per step."""
    max_step_seconds: float | None = _scheduling(None, minimum=0, unset="0.5 on the CPU, 0 on CUDA")
    """Seconds that prompts and media take at most, about, in a step with decodes: they are cut to what the workers can
    compute in that time, as the steps so far have shown. 0: no limit."""
    ignore_priority: bool = _scheduling(False)
    """Ignore the `priority` of requests. Use it where all clients share an API key or a proxy's address."""
    async_scheduling: bool = _scheduling(True)
    """Schedule the next step while the workers run the current one."""

    enable_prefix_caching: bool = _caches(True)
    """Reuse KV blocks of earlier requests with the same prefix."""
    block_size: int = _caches(16, minimum=1)
    """Tokens per block of the KV cache."""
    kv_cache_memory_bytes: int | None = _caches(
        None,
        minimum=1,
        unset="on the CPU what one request of --max-model-len needs, at least 1G divided between the engines; "
        "--gpu-memory-utilization on CUDA",
    )
    """Size of each worker's KV cache; no more than --max-num-seqs sequences of --max-model-len tokens fill."""
    gpu_memory_utilization: float = _caches(0.9, minimum=0.05, maximum=1.0)
    """Fraction of a CUDA device's memory for its workers: weights, media, the largest step, and the KV cache, which
    gets the rest. CUDA graphs are not counted: leave room for them. No effect on the CPU."""
    num_gpu_blocks_override: int | None = _caches(None, minimum=1, unset="as many as fit into the memory")
    """Number of KV cache blocks, on any device."""
    state_cache_memory_bytes: int | None = _caches(None, minimum=0, unset="a quarter of that memory")
    """Size of the prefix cache's snapshots of recurrent states on each worker, a part of its KV cache's memory; for
    models with such states."""
    state_snapshot_interval: int | None = _caches(
        None, minimum=1, unset="the KV cache's tokens / snapshots, at least 256"
    )
    """Tokens of a prompt between two such snapshots, a multiple of --block-size; there are others at the end of each
    media item, prompt and answer."""
    encoder_cache_tokens: int | None = _caches(
        None, minimum=1, unset=f"{ENCODER_TOKENS}, or what the KV cache holds if that is less"
    )
    """Size of the encoder cache in media tokens; also the maximum of one prompt."""

    limit_mm_per_prompt: dict[str, Any] = _media({}, parse_text=parse_limits, metavar="JSON", unset="no limit")
    """Maximum items of each modality per prompt, such as '{"video": 1, "image": 4}' or video=1,image=4."""
    media_io_kwargs: dict[str, dict[str, Any]] = _media({}, metavar="JSON", unset="the model's own sampling")
    """Sampling of videos, such as '{"video": {"num_frames": 10}}' or '{"video": {"fps": 2}}'."""
    mm_processor_kwargs: dict[str, Any] = _media({}, metavar="JSON", unset="the model's own")
    """Arguments of the model's Hugging Face processor, such as '{"size": {"shortest_edge": 3136, "longest_edge":
    50176}}'."""
    allow_partial_video: bool = _media(False)
    """Accept truncated or damaged videos, with a warning in the response."""

    allowed_local_media_path: str | None = _sources(None, metavar="DIRECTORY", unset="none")
    """Directory from which `file://` media may be read."""
    allowed_media_domains: list[str] = _sources([], metavar="HOST[:PORT]", unset="none")
    """Hosts from which `http(s)://` media may be fetched, also after a redirect. All addresses of a host name must be
    public, or in networks that are listed too, such as 10.0.0.0/8 or fd00::/8. URLs may name a listed address, such as
    127.0.0.1:8080, but no address of a listed network."""
    media_fetch_timeout: float = _sources(30.0, minimum=0.1, maximum=3600)
    """Seconds to fetch an `http(s)://` item."""

    max_media_bytes: int = _limits(256 << 20, minimum=1, maximum=(2 << 30) - 4096)  # at most what Linux writes at once
    """Maximum size of an encoded image or video."""
    max_image_pixels: int = _limits(64 << 20, minimum=1)
    """Maximum pixels of an image."""
    max_frame_pixels: int = _limits(8192 * 4608, minimum=1)  # 8K
    """Maximum pixels of a video frame."""
    max_video_seconds: float = _limits(3600.0, minimum=0.1)
    """Maximum duration of a video."""
    max_video_frames: int = _limits(220_000, minimum=1)  # an hour at 60 frames per second
    """Maximum frames of a video file."""
    # As many as the Qwen-VL processors take.
    max_video_frames_kept: int = _limits(768, minimum=1, maximum=MOST_FRAMES_KEPT)
    """Maximum frames sampled from a video."""
    max_video_pixels_kept: int = _limits(512 << 20, minimum=1)  # 1.5 GiB of RGB
    """Maximum pixels of all sampled frames; larger ones are scaled."""
    # An hour of 720p in H.265 takes 39 s, a minute of 4K 53 s.
    media_decode_timeout: float = _limits(120.0, minimum=0.1, maximum=3600)
    """Seconds to decode an image or video."""
    media_decoder_memory: int = _limits(1 << 30, minimum=64 << 20)
    """Maximum memory of a decoder process for one image or video, beyond its own size, the encoded file and the sampled
    frames."""

    maximum_concurrent_videos: int = _admission(64, minimum=1)
    """Maximum images and videos per API server that are decoded, processed or sent; others are queued."""
    max_num_queued_reqs: int = _admission(4096, minimum=1)
    """Maximum unfinished requests per API server; further ones are refused with 429. Each choice counts, of all
    prompts."""
    max_inflight_media_gb: float = _admission(4.0, minimum=0.001)
    """Maximum GiB per API server of encoded media, reserved before the download and held until the request is sent to
    an engine; until its first output if that has only embeddings of an item. Decoded frames count until they are
    processed. Request bodies in transfer may take as much again. A request that does not fit beside others is refused
    with 429."""
    max_request_bytes: int = _admission(1 << 30, minimum=1)
    """Maximum size of a request body; media in `data:` URLs take 4/3 of their size."""
    max_text_bytes: int = _admission(4 << 20, minimum=1)
    """Maximum size of a request body without the base64 data of its images and videos."""

    mm_processor_cache_type: Literal["auto", "lru", "shm"] = _transport("auto")
    """Cache of processed media: `shm` (in shared memory, once per engine), `lru` (a copy in each worker), or `auto`:
    `shm`, unless --mm-processor-device is `cuda`."""
    mm_processor_cache_gb: float | None = _transport(
        None, minimum=0, unset="4, or a quarter of the free memory if that is less"
    )
    """Size of that cache in GiB: of all engines together (shm), or of each worker (lru); 0 disables it."""
    mm_shm_cache_max_object_size_mb: int = _transport(128, minimum=1)
    """Maximum size of an item in the shm cache, in MiB; a larger item is sent uncached."""
    mm_tensor_ipc: TensorIpc = _transport(
        "auto", twins={"--enable-multimodal-tensor-ipc": "torch_shm", "--disable-multimodal-tensor-ipc": "direct_rpc"}
    )
    """Transport of media tensors that are not in the shm cache: `torch_shm` (shared memory), `direct_rpc` (copied
    through a socket), or `auto`: the first that passes its probe."""
    mm_ipc_memory_bytes: int = _transport(1 << 30, minimum=1 << 20)
    """Maximum memory per API server for tensors in transfer to the workers, by any transport, in pages of 64 KiB;
    further requests wait."""
    mm_processor_device: Literal["cpu", "cuda"] = _transport("cpu")
    """Device on which frames become patches; from `cuda` they reach the workers without a copy on the host."""
    mm_ipc_gpu_memory_gb: float | None = _transport(None, unset="4 with --mm-processor-device cuda", minimum=0.1)
    """Maximum memory of CUDA devices for such patches, in GiB, of all API servers together. It and 1 GiB per API server
    for the CUDA context are taken off the KV cache. What does not fit is processed on the CPU, or copied through the
    host."""

    def validate(self) -> None:
        """Raises ConfigError for values that do not fit the others, or name what does not exist; each is a line of the
        text."""
        if errors := [*self._server_errors(), *self._media_errors()]:
            raise ConfigError("\n".join(errors))

    def _server_errors(self) -> Iterator[str]:
        if self.convert != "auto" and self.runner == "generate":
            yield "--convert needs --runner pooling or auto; omit it to generate text"
        if not all(self.api_key):
            yield "--api-key: empty; omit the flag to require none"
        if self.uds is not None and (self.host, self.port) != (EngineConfig.host, EngineConfig.port):
            yield "--uds: a unix socket has neither --host nor --port; keep one of them"
        if any(not name or {"/", ":"} & set(name) for name in self.allowed_hosts):
            yield "--allowed-hosts: names only, not empty, without scheme and port"
        for address in self.forwarded_allow_ips if self.forwarded_allow_ips != ["*"] else ():
            try:  # uvicorn takes what is neither for a name, which no client has
                ipaddress.ip_network(address)
            except ValueError as error:
                yield f"--forwarded-allow-ips: {error}"
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            yield "--ssl-keyfile, --ssl-certfile: set both"
        narrowed = (self.allowed_methods, self.allowed_headers, self.allow_credentials) != (["*"], ["*"], False)
        if narrowed and not self.allowed_origins:
            yield "--allowed-methods, --allowed-headers and --allow-credentials need --allowed-origins"
        if self.chat_template is not None and not os.path.isfile(self.chat_template):
            yield f"--chat-template: {self.chat_template} is not a file"
        if (self.state_snapshot_interval or 0) % self.block_size:
            yield f"--state-snapshot-interval: not a multiple of --block-size, {self.block_size}"

    def _media_errors(self) -> Iterator[str]:
        if self.allowed_local_media_path is not None and not os.path.isdir(self.allowed_local_media_path):
            yield f"--allowed-local-media-path: {self.allowed_local_media_path} is not a directory"
        if self.media_io_kwargs.keys() - {"video"}:
            yield "--media-io-kwargs: only `video` takes arguments"
        for flag, given, known in (
            ("--media-io-kwargs", self.media_io_kwargs.get("video", {}), VIDEO_ARGUMENTS),
            ("--mm-processor-kwargs", self.mm_processor_kwargs, PROCESSOR_ARGUMENTS),
        ):
            if unknown := [name for name, value in given.items() if name not in known and value is not None]:
                yield f"{flag}: unknown {', '.join(unknown)}; it takes {', '.join(known)}"
        for modality, limit in self.item_limits.items():
            if modality not in ("image", "video", "audio") or not isinstance(limit, int) or limit < 0:
                wrong = f"{modality!r}: {limit!r}"
                yield f"--limit-mm-per-prompt: {wrong} is not one of image, video with a count >= 0"
        if self.mm_processor_device == "cpu":
            if self.mm_ipc_gpu_memory_gb is not None:
                yield "--mm-ipc-gpu-memory-gb needs --mm-processor-device cuda"
            return
        flag = "--mm-processor-device"
        if self.device == "cpu":
            yield f"{flag}: cuda needs workers on CUDA, not --device cpu; choose cpu"
        if self.mm_processor_cache_type == "shm":
            yield f"{flag}: no CUDA tensors in the shm cache; choose --mm-processor-cache-type lru or auto"
        if self.mm_tensor_ipc == "direct_rpc":
            yield f"{flag}: direct_rpc carries no CUDA tensors; choose --mm-tensor-ipc auto"

    @property
    def served_names(self) -> list[str]:
        """Names by which clients may ask for the model; the first is the one in responses."""
        default = BUNDLED_NAME if self.model == BUNDLED_MODEL else self.model
        return self.served_model_name or [default]

    @property
    def item_limits(self) -> dict[str, int]:
        """Most items in one prompt, by modality; vLLM's `{"image": {"count": 4}}` is 4."""
        limits = self.limit_mm_per_prompt.items()
        counts = {name: limit.get("count", ...) if isinstance(limit, dict) else limit for name, limit in limits}
        return {name: count for name, count in counts.items() if count is not ...}

    @property
    def engines(self) -> int:
        """Data parallel engines; 1 where that is `auto` and the start has not chosen."""
        return self.data_parallel_size or 1

    @property
    def cpu_cache_bytes(self) -> int:
        """Size of a worker's KV cache on the CPU, snapshots included."""
        return self.kv_cache_memory_bytes or CPU_CACHE_BYTES // min(self.engines, CPU_CACHE_PARTS)

    def sequence_tokens(self, device: str, made_for: int) -> int:
        """Most tokens of prompt and output on workers on `device`, "cpu" or "cuda", of a model that was made for
        `made_for`, unless the KV cache holds less."""
        return self.max_model_len or (min(made_for, CPU_SEQUENCE_TOKENS) if device == "cpu" else made_for)

    def encoder_tokens(self, capacity: int) -> int:
        """Size of the encoder cache beside a KV cache of so many tokens."""
        return self.encoder_cache_tokens or min(capacity, ENCODER_TOKENS)

    def step_sequences(self, device: str, recurrent: bool) -> int:
        """Most sequences of one step of workers on `device`, "cpu" or "cuda"; `recurrent`: they have states."""
        large = device == "cuda" and not recurrent
        return self.max_num_seqs or (STEP_SEQUENCES_CUDA if large else STEP_SEQUENCES)

    def step_tokens(self, device: str) -> int:
        """Most tokens computed in one step of workers on `device`, "cpu" or "cuda"."""
        return self.max_num_batched_tokens or STEP_TOKENS[device]

    def step_seconds(self, device: str) -> float:
        """Seconds of prompts and media in a step with decodes on workers on `device`, "cpu" or "cuda"; 0: no limit."""
        return STEP_SECONDS[device] if self.max_step_seconds is None else self.max_step_seconds

    def step_media_tokens(self, device: str) -> int:
        """Most media tokens encoded in one step of workers on `device`, "cpu" or "cuda"."""
        return self.max_num_encoder_input_tokens or self.step_tokens(device)


@functools.cache
def fields() -> list[Setting]:
    """The settings in their order; those of a group are next to each other."""
    return settings_of(EngineConfig)


def groups() -> dict[str, list[Setting]]:
    return {group: [*settings] for group, settings in itertools.groupby(fields(), lambda setting: setting.group)}
