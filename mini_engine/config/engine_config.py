"""All options of a server: one field each, in the groups that `--help` and docs/config.md show."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any, Literal

from mini_engine.config.options import (
    ConfigError,
    options_of,
    parse_bytes,
    parse_count,
    parse_json_object,
    parse_length,
    parse_limits,
)
from mini_engine.decode_limits import MOST_FRAMES_KEPT, DecodeLimits
from mini_engine.log import LogFormat

BUNDLED_NAME = "mini-engine-demo"  # what clients call it
BUNDLED_MODEL = str(Path(__file__).parent.parent / "demo" / "weights")

IPC_GPU_GIB = 4.0  # --mm-ipc-gpu-memory-gb where it is not given
SLOTS_PART = 4  # a quarter of that memory is for patches on their way
STAGING_SLOTS = 8  # messages on their way from an API server to an engine at once: a part of that quarter for each
LEAST_SLOT = 1 << 20  # bytes of a slot: less would hold the patches of small images only

# Tokens in a step where no flag says, by kind of device: so many that a step of a large model is neither wasted on its
# fixed cost nor much longer than people want to wait for a token.
STEP_TOKENS = {"cpu": 512, "cuda": 2048}

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
        BUNDLED_MODEL, "Local directory or hub name of a model.", unset="the bundled model", positional=True,
        metavar="MODEL",
    )  # fmt: skip
    served_model_name: list[str] = _model(
        [], "Names by which clients ask for the model.", metavar="NAME",
        unset="MODEL, or mini-engine-demo for the bundled one",
    )  # fmt: skip
    revision: str | None = _model(None, "Branch, tag or commit of a hub model.", unset="the hub's main branch")
    trust_remote_code: bool = _model(False, "Let the hub model's own processor code run.")
    chat_template: str | None = _model(
        None, "File with a Jinja chat template to use instead of the model's.", unset="the model's", metavar="FILE"
    )
    generation_config: str = _model(
        "auto", "Where the defaults of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens come from: "
        "`auto` (the model's generation_config.json), `vllm` (none), or a directory that holds such a file.",
        metavar="SOURCE",
    )  # fmt: skip
    dtype: Dtype = _model(
        "auto", "Number format of weights and activations; `auto` takes the checkpoint's, `float` is float32 and "
        "`half` float16.",
    )  # fmt: skip
    load_format: Literal["auto", "safetensors", "dummy"] = _model(
        "auto", "Where weights come from: `safetensors` files, `auto` the same, or `dummy`: random ones, of a model "
        "that needs no more than its config, tokenizer and processor files.",
    )  # fmt: skip
    device: Literal["auto", "cpu", "cuda"] = _model(
        "auto", "Where the workers run; `auto` takes CUDA when there is a device."
    )
    attention_backend: AttentionBackendName = _model(
        "auto", "What computes the decoder's attention: `triton` (this project's kernels), `sdpa` (torch's operators "
        "over gathered blocks), or `auto`: triton on CUDA, sdpa on the CPU.",
    )  # fmt: skip
    enforce_eager: bool = _model(False, "Run decode steps without CUDA graphs.")
    seed: int = _model(0, "Seed of the server's own randomness.")
    max_model_len: int | None = _model(
        None, "Longest prompt and output together, in tokens, at most what the model was made for; `auto` is the "
        "default.", parse=parse_length, minimum=1,
        unset="what the model was made for, or less if the KV cache holds less",
    )  # fmt: skip

    tensor_parallel_size: int = _processes(
        1, "Worker processes that share each layer of the model.", short="-tp", minimum=1
    )
    mm_encoder_tp_mode: Literal["weights", "data"] = _processes(
        "weights", "How those workers share the vision tower: `weights` splits each of its layers too, `data` keeps it "
        "whole on each of them and distributes the images and frames.",
    )  # fmt: skip
    distributed_backend: Literal["auto", "gloo", "nccl", "shm"] = _processes(
        "auto", "What carries tensors between those workers: `nccl`; `shm`, memory that they share; `gloo`; or `auto`: "
        "NCCL on CUDA and shared memory on the CPU. With `gloo` asked for, workers may share CUDA devices, which is "
        "slow and meant for tests.",
    )  # fmt: skip
    data_parallel_size: int = _processes(
        1, "Engines, each with its own copy of the model.", short="-dp", minimum=1, maximum=64
    )
    api_server_count: int = _processes(1, "Number of API-server processes.", short="-asc", minimum=1, maximum=64)
    collective_timeout: float = _processes(
        60.0, "Seconds after which a collective between workers fails, an unresponsive engine or API server is killed, "
        "or a request fails whose media do not reach the workers (30 at most).", minimum=1, maximum=86400,
    )  # fmt: skip
    startup_timeout: float = _processes(
        600.0, "Seconds within which all processes must be ready, or the start fails.", minimum=1, maximum=86400
    )
    health_timeout: float = _processes(
        10.0, "Seconds within which all workers must answer a ping, or end a running step, for `/health` to be 200.",
        minimum=0.1, maximum=3600,
    )  # fmt: skip
    shutdown_timeout: float = _processes(
        30.0, "Seconds that running requests may take to end after SIGTERM; 0 ends them at once, as SIGINT does.",
        minimum=0, maximum=86400,
    )  # fmt: skip
    restart_engine: int = _processes(
        0, "Times in a row that all engines are restarted after one has died, behind the same sockets; at 0 the server "
        "exits. The flag alone is 3.", minimum=0, bare="3", metavar="MAX",
    )  # fmt: skip

    host: str = _server("0.0.0.0", "Address to listen on.")
    port: int = _server(8000, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    uds: str | None = _server(
        None, "Unix socket to listen on instead of --host and --port.", metavar="PATH", unset="none"
    )
    root_path: str = _server("", "Path under which a proxy shows the server, such as /engine.", unset="none")
    max_connections: int | None = _server(
        None, "Connections per API server, idle ones too, above which requests get a 503. It protects the file "
        "descriptors; --max-num-queued-reqs limits the load.", minimum=1,
        unset="half of the files that a process may open",
    )  # fmt: skip
    timeout_client: float = _server(
        30.0, "Seconds in which a client must send the request headers, send 8 KiB and an eighth more of the body, and "
        "read what it is sent; a connection that is slower is closed.", minimum=0.1, maximum=3600,
    )  # fmt: skip
    timeout_keep_alive: int = _server(
        5, "Seconds for which a connection stays open after a response.", minimum=0, maximum=3600
    )

    api_key: list[str] = _security(
        [], "Keys of which clients must send one in the header `Authorization: Bearer KEY`, but for `/health` and "
        "`/live`; may be given several times. A flag shows in the list of processes, the environment variable does "
        "not.", metavar="KEY", unset="no key is asked for", secret=True,
    )  # fmt: skip
    ssl_keyfile: str | None = _security(
        None, "File with the private key for TLS; with --ssl-certfile.", metavar="FILE", unset="no TLS"
    )
    ssl_certfile: str | None = _security(
        None, "File with the certificate for TLS; with --ssl-keyfile.", metavar="FILE", unset="no TLS"
    )
    allowed_origins: list[str] = _security(
        [], "Origins whose pages may use the server from a browser (CORS); `*` is all.", metavar="ORIGIN", unset="none"
    )
    allowed_methods: list[str] = _security(["*"], "Methods allowed to those pages.", metavar="METHOD", unset="all")
    allowed_headers: list[str] = _security(["*"], "Headers allowed to those pages.", metavar="HEADER", unset="all")
    allow_credentials: bool = _security(False, "Let those pages send cookies and the like.")

    log_level: Literal["debug", "info", "warning", "error"] = _logging("info", "Least severe log lines to print.")
    log_format: LogFormat = _logging("text", "Form of the log's lines; each an object with `json`.")
    enable_log_requests: bool = _logging(
        False, "Log a line for each request when it has ended: id, status, time; never what it says.",
        twins={"--disable-log-requests": False},
    )  # fmt: skip
    disable_log_stats: bool = _logging(
        False, "Log no line with the server's statistics every ten seconds in which something ran."
    )

    max_num_seqs: int = _scheduling(64, "Most sequences computed in one step.", minimum=1)
    max_num_batched_tokens: int | None = _scheduling(
        None, "Most tokens computed in one step, media tokens in the vision tower among them; longer prompts are "
        "computed in chunks.", parse=parse_count, minimum=1, unset="512 on the CPU, 2048 on CUDA",
    )  # fmt: skip
    long_prefill_token_threshold: int | None = _scheduling(
        None, "Most tokens of one prompt computed in one step while other prompts wait; 0: no such bound.", minimum=0,
        unset="half of --max-num-batched-tokens",
    )  # fmt: skip
    max_num_encoder_input_tokens: int | None = _scheduling(
        None, "Most media tokens encoded in one step; a longer video is encoded over several steps.", minimum=1,
        unset="--max-num-batched-tokens",
    )  # fmt: skip
    async_scheduling: bool = _scheduling(
        True, "Schedule and dispatch the next step while the workers run the present one."
    )

    enable_prefix_caching: bool = _caches(
        True, "Keep the KV blocks of finished requests, for prompts that begin alike."
    )
    block_size: int = _caches(16, "Tokens in one block of the KV cache.", minimum=1)
    kv_cache_memory_bytes: int | None = _caches(
        None, "Size of each worker's KV cache. No more is taken than --max-num-seqs sequences of --max-model-len "
        "tokens fill.", parse=parse_bytes, minimum=1, unset="1G on the CPU, --gpu-memory-utilization on CUDA",
    )  # fmt: skip
    gpu_memory_utilization: float = _caches(
        0.9, "Share of a CUDA device's memory that its workers may take for everything: weights, media, the largest "
        "step, and the KV cache, which gets what is left; no effect on the CPU.", minimum=0.05, maximum=1.0,
    )  # fmt: skip
    num_gpu_blocks_override: int | None = _caches(
        None, "Number of KV-cache blocks, on any device, in place of the two before.", minimum=1,
        unset="as many as the memory for them holds",
    )  # fmt: skip
    encoder_cache_tokens: int = _caches(
        65536, "Most media tokens whose embeddings the workers keep, for running requests and for those to come; also "
        "the most that one prompt may hold.", minimum=1,
    )  # fmt: skip

    limit_mm_per_prompt: dict[str, Any] = _media(
        {}, 'Most items of each modality in one prompt, such as \'{"video": 1, "image": 4}\' or video=1,image=4.',
        parse=parse_limits, metavar="JSON", unset="no limit",
    )  # fmt: skip
    media_io_kwargs: dict[str, dict[str, Any]] = _media(
        {}, 'How media are read, such as \'{"video": {"num_frames": 10}}\' or \'{"video": {"fps": 2}}\'.',
        parse=parse_json_object, metavar="JSON", unset="the model's own sampling",
    )  # fmt: skip
    mm_processor_kwargs: dict[str, Any] = _media(
        {}, 'Arguments for the model\'s Hugging Face processor, such as \'{"size": {"shortest_edge": 3136, '
        '"longest_edge": 50176}}\'.', parse=parse_json_object, metavar="JSON", unset="the model's own",
    )  # fmt: skip
    allow_partial_video: bool = _media(
        False, "Answer about a video that is cut short or damaged from what can be read of it, with a warning; "
        "otherwise it is refused.",
    )  # fmt: skip

    allowed_local_media_path: str | None = _sources(
        None, "Directory below which `file://` media may be read.", metavar="DIRECTORY", unset="none"
    )
    allowed_media_domains: list[str] = _sources(
        [], "Hosts from which `http(s)://` media may be fetched. All addresses of a host name must be public, or in "
        "networks that are listed too, such as 10.0.0.0/8 or fd00::/8. An address, such as 127.0.0.1:8080, is allowed "
        "in URLs as it stands; a network is not.", metavar="HOST[:PORT]", unset="none",
    )  # fmt: skip
    allow_media_redirects: bool = _sources(False, "Follow redirects to other hosts of --allowed-media-domains.")
    media_fetch_timeout: float = _sources(
        30.0, "Seconds within which an `http(s)://` item must be fetched.", minimum=0.1, maximum=3600
    )

    max_media_bytes: int = _limits(
        256 << 20, "Largest encoded image or video accepted.", parse=parse_bytes, minimum=1,
        maximum=(2 << 30) - 4096,  # what Linux writes at once
    )  # fmt: skip
    max_image_pixels: int = _limits(DecodeLimits.max_image_pixels, "Most pixels of an image.", minimum=1)
    max_frame_pixels: int = _limits(DecodeLimits.max_frame_pixels, "Most pixels of a video's frame.", minimum=1)
    max_video_seconds: float = _limits(DecodeLimits.max_video_seconds, "Longest video, in seconds.", minimum=0.1)
    max_video_frames: int = _limits(DecodeLimits.max_video_frames, "Most frames of a video file.", minimum=1)
    max_video_frames_kept: int = _limits(
        DecodeLimits.max_video_frames_kept, "Most frames that may be sampled from a video.", minimum=1,
        maximum=MOST_FRAMES_KEPT,
    )  # fmt: skip
    max_video_pixels_kept: int = _limits(
        DecodeLimits.max_video_pixels_kept, "Most pixels of all frames sampled from a video; larger frames are scaled "
        "down to fit.", minimum=1,
    )  # fmt: skip
    media_decode_timeout: float = _limits(
        DecodeLimits.media_decode_timeout, "Seconds within which an image or video must be decoded.", minimum=0.1,
        maximum=3600,
    )  # fmt: skip
    media_decoder_memory: int = _limits(
        DecodeLimits.media_decoder_memory, "Most memory that a decoder process may take for one image or video, beside "
        "itself, the encoded file and the frames that it keeps.", parse=parse_bytes, minimum=64 << 20,
    )  # fmt: skip

    maximum_concurrent_videos: int = _admission(
        64, "Most images and videos per API server admitted to decoding and processing at once; more are queued.",
        minimum=1,
    )  # fmt: skip
    max_num_queued_reqs: int = _admission(
        4096, "Most requests per API server that are not finished yet, whatever they wait for; one more is refused "
        "with 429.", minimum=1,
    )  # fmt: skip
    max_inflight_media_gb: float = _admission(
        4.0, "Most encoded images and videos per API server, in GiB, that requests hold until an engine has taken them "
        "over; reserved before they are fetched, and never exceeded by downloads. Decoded frames count until they are "
        "processed. Bodies that are being received may have as much again. A request that finds no room is refused "
        "with 429.", minimum=0.001,
    )  # fmt: skip
    max_request_bytes: int = _admission(
        1 << 30, "Longest body of a request; what it holds in `data:` URLs is 4/3 of its size.", parse=parse_bytes,
        minimum=1,
    )  # fmt: skip

    mm_processor_cache_type: Literal["auto", "lru", "shm"] = _transport(
        "auto", "Where processed media are kept for requests that bring them again: `shm` (in shared memory, once for "
        "all workers), `lru` (a copy in each worker), or `auto`: `shm`, unless --mm-processor-device is `cuda`.",
    )  # fmt: skip
    mm_processor_cache_gb: float | None = _transport(
        None, "Most memory for them, in GiB: of all API servers together (shm), or of each worker (lru); 0 turns it "
        "off.", minimum=0, unset="4, or a quarter of the free memory where that is less",
    )  # fmt: skip
    mm_shm_cache_max_object_size_mb: int = _transport(
        128, "Largest item kept in shared memory, in MiB; a larger one is handed to the workers uncached.", minimum=1
    )
    mm_tensor_ipc: TensorIpc = _transport(
        "auto", "How media tensors that are not in the cache's shared memory reach the workers: `torch_shm` (shared "
        "memory), `direct_rpc` (copied through a socket), or `auto`: the first that passes its probe.",
        twins={"--enable-multimodal-tensor-ipc": "torch_shm", "--disable-multimodal-tensor-ipc": "direct_rpc"},
    )  # fmt: skip
    mm_ipc_memory_bytes: int = _transport(
        1 << 30, "Most memory per API server for tensors on their way to the workers, by whichever transport, in pages "
        "of 64 KiB; a request that finds none waits.", parse=parse_bytes, minimum=1 << 20,
    )  # fmt: skip
    mm_processor_device: Literal["cpu", "cuda"] = _transport(
        "cpu", "Where frames become patches: `cpu`, or `cuda`, from where they go to the workers without a copy on the "
        "host.",
    )  # fmt: skip
    mm_ipc_gpu_memory_gb: float | None = _transport(
        None, "Most memory of CUDA devices that all API servers together take for such patches, in GiB, taken off the "
        "KV cache with 1 GiB more for CUDA itself in each of them. Three quarters are for making the patches: an item "
        "that needs more is made on the CPU. A quarter is divided into slots for those on their way, eight for each "
        "API server and engine: a prompt whose patches find none idle, or are too large for one, is copied through the "
        "host. Both are counted.", unset="4, where the patches are made on CUDA", minimum=0.01,
    )  # fmt: skip

    def validate(self) -> None:
        """Raises ConfigError for the first value that does not fit the others, or names what does not exist."""
        self._check_model()
        self._check_server()
        self._check_media()
        self._check_cuda()

    def _check_model(self) -> None:
        if self.chat_template is not None and not os.path.isfile(self.chat_template):
            raise ConfigError(f"--chat-template: {self.chat_template} is not a file")
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name: a name must not be empty; leave the flag out for the default")

    def _check_server(self) -> None:
        if not all(self.api_key):
            raise ConfigError("--api-key: a key must not be empty; leave the flag out to ask for none")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path: {self.root_path!r} must begin with a slash and not end with one")
        if self.uds is not None and (self.host, self.port) != (EngineConfig.host, EngineConfig.port):
            raise ConfigError("--uds: a unix socket has neither --host nor --port; keep one of them")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile: TLS needs both of them")
        narrowed = (self.allowed_methods, self.allowed_headers, self.allow_credentials) != (["*"], ["*"], False)
        if narrowed and not self.allowed_origins:
            raise ConfigError("--allowed-methods, --allowed-headers and --allow-credentials need --allowed-origins")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials: name the --allowed-origins; with * any page could use them")

    def _check_media(self) -> None:
        for modality, limit in self.item_limits.items():
            if (modality, limit) == ("audio", 0):
                continue  # none is taken in any case
            if modality not in ("image", "video") or not isinstance(limit, int) or limit < 0:
                raise ConfigError(
                    f"--limit-mm-per-prompt: {modality!r}: {limit!r} is not one of image, video with a count >= 0"
                )
        for modality, kwargs in self.media_io_kwargs.items():
            if modality not in ("image", "video"):
                raise ConfigError(f"--media-io-kwargs: {modality!r} must be image or video, with a JSON object")
            if modality == "image" and kwargs:
                raise ConfigError("--media-io-kwargs: images take no arguments")
        if self.allowed_local_media_path is not None and not os.path.isdir(self.allowed_local_media_path):
            raise ConfigError(f"--allowed-local-media-path: {self.allowed_local_media_path} is not a directory")

    def _check_cuda(self) -> None:
        """What needs CUDA, or does not go with patches that are made there."""
        if self.device == "cpu" and self.distributed_backend == "nccl":
            raise ConfigError("--distributed-backend: nccl needs CUDA devices, not --device cpu; use shm or auto")
        if self.mm_processor_device == "cpu":
            if self.mm_ipc_gpu_memory_gb is not None:
                raise ConfigError("--mm-ipc-gpu-memory-gb is for --mm-processor-device cuda; leave it out, or set that")
            return
        if self.device == "cpu":
            raise ConfigError("--mm-processor-device: cuda needs workers on CUDA, not --device cpu; choose cpu")
        if self.mm_processor_cache_type == "shm":
            raise ConfigError(
                "--mm-processor-device cuda: patches on a device are not kept in shared memory; choose "
                "--mm-processor-cache-type lru or auto"
            )
        if self.mm_tensor_ipc == "direct_rpc":
            raise ConfigError(
                "--mm-processor-device cuda: direct_rpc carries no patches on a device; choose --mm-tensor-ipc auto"
            )
        slots = self.api_server_count * self.data_parallel_size * STAGING_SLOTS
        least = SLOTS_PART * slots * LEAST_SLOT / (1 << 30)
        if (self.mm_ipc_gpu_memory_gb or IPC_GPU_GIB) < least:
            raise ConfigError(
                f"--mm-ipc-gpu-memory-gb: {slots} staging slots, {STAGING_SLOTS} from each of {self.api_server_count} "
                f"API server(s) to each of {self.data_parallel_size} engine(s), share a quarter of it; "
                f"set {math.ceil(least * 100) / 100:g} at least"
            )

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

    def step_tokens(self, device: str) -> int:
        """Most tokens computed in one step of workers on `device`, "cpu" or "cuda"."""
        return self.max_num_batched_tokens or STEP_TOKENS[device]

    def step_media_tokens(self, device: str) -> int:
        """Most media tokens encoded in one step of workers on `device`, "cpu" or "cuda"."""
        return self.max_num_encoder_input_tokens or self.step_tokens(device)
