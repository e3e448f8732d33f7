"""The configuration: every option once, with its type, default, help, group and limits.

The command line, the environment variables, `--help` and the docs are made from these fields (`cli.py`). The values
reach the processes inside `Init`. This file knows nothing of models, sockets or torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from mini_engine.log import LogFormat
from mini_engine.media.addresses import parse_allowed_host
from mini_engine.media.limits import DecodeLimits, ImageLimits

ENV_PREFIX = "MINI_ENGINE_"
BUNDLED_MODEL = str(Path(__file__).parent / "demo" / "weights")


class ConfigError(ValueError):
    """A setting that cannot be used. The text names the flag, the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class Option:
    """What the command line and the docs need to know about a field beside its type and default."""

    help: str
    group: str
    short: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    positional: bool = False


def option(default: Any, help: str, group: str, **more: Any) -> Any:
    """A dataclass field with an `Option` in its metadata."""
    metadata = {"option": Option(help=help, group=group, **more)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: default.copy(), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_bytes(text: str) -> int:
    """`512M`, `4G`, `1.5GiB`, `1000` -> bytes; the letters are powers of 1024.

    Raises:
        ValueError: not a number with one of these units.
    """
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    stripped = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = stripped[-1:] if stripped[-1:].isalpha() else ""
    if unit not in units:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with K, M, G or T, such as 512M")
    try:
        value = float(stripped.removesuffix(unit))
    except ValueError:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with K, M, G or T, such as 512M") from None
    return int(value * units[unit])


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object from the command line.

    Raises:
        ValueError: not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f'{text!r} is not a JSON object such as {{"video": 1}}')
    return value


Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
MediaCacheType = Literal["auto", "lru", "shm"]
TensorIpc = Literal["auto", "torch_shm", "direct_rpc"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of a server. `validate` has passed for every instance that leaves `cli.parse`."""

    # --- model
    model: str = option(
        BUNDLED_MODEL, "Local directory or hub name of a model. Without it the bundled model is served.", "Model",
        positional=True, metavar="MODEL",
    )  # fmt: skip
    served_model_name: list[str] = option(
        [], "Names by which clients ask for the model; default: MODEL, or `mini-engine-demo` for the bundled one.",
        "Model", metavar="NAME",
    )  # fmt: skip
    revision: str | None = option(None, "Branch, tag or commit of a hub model.", "Model")
    trust_remote_code: bool = option(False, "Let the hub model's own processor code run.", "Model")
    chat_template: str | None = option(None, "File with a Jinja chat template to use instead of the model's.", "Model")
    generation_config: str = option(
        "auto", "Where sampling defaults come from: `auto` (the model's generation_config.json), `vllm` (none), "
        "or a directory that holds such a file.", "Model",
    )  # fmt: skip
    dtype: Dtype = option("auto", "Number format of weights and activations; `auto` takes the checkpoint's.", "Model")
    device: Device = option("auto", "Where the workers run; `auto` takes CUDA when there is a device.", "Model")
    seed: int = option(0, "Seed of the server's own randomness.", "Model")
    max_model_len: int | None = option(
        None, "Longest prompt and output together, in tokens; default: what the model was made for.", "Model", minimum=1
    )

    # --- server
    host: str = option("0.0.0.0", "Address to listen on.", "Server")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", "Server", minimum=0, maximum=65535)
    uds: str | None = option(None, "Unix socket to listen on instead of --host and --port.", "Server")
    root_path: str = option("", "Path under which a proxy shows the server, such as /engine.", "Server")
    ssl_keyfile: str | None = option(None, "File with the private key for TLS; with --ssl-certfile.", "Server")
    ssl_certfile: str | None = option(None, "File with the certificate for TLS; with --ssl-keyfile.", "Server")
    ssl_ca_certs: str | None = option(
        None, "File with the certificates that clients' own must go back to; with --ssl-cert-reqs.", "Server"
    )
    ssl_cert_reqs: int = option(
        0, "Whether clients must have a certificate: 0 no, 1 they may, 2 they must; with --ssl-ca-certs.", "Server",
        minimum=0, maximum=2,
    )  # fmt: skip
    allowed_origins: list[str] = option(
        [], "Origins whose pages may use the server from a browser (CORS); `*` is all. Default: none.", "Server",
        metavar="ORIGIN",
    )  # fmt: skip
    allowed_methods: list[str] = option(["*"], "Methods allowed to them; default: all.", "Server", metavar="METHOD")
    allowed_headers: list[str] = option(["*"], "Headers allowed to them; default: all.", "Server", metavar="HEADER")
    allow_credentials: bool = option(False, "Let them send cookies and the like.", "Server")
    api_server_count: int = option(1, "Number of API-server processes.", "Server", minimum=1, maximum=64)
    startup_timeout: float = option(
        600.0, "Seconds within which all processes must be ready, or the start fails.", "Server", minimum=1
    )
    api_key: list[str] = option(
        [], "Keys of which clients must send one in the header `Authorization: Bearer KEY`, but for `/health` and "
        "`/live`; may be given several times. Default: no key is asked for. A flag shows in the list of processes, the "
        "environment variable does not.", "Server", metavar="KEY",
    )  # fmt: skip
    health_timeout: float = option(
        10.0, "Seconds within which all workers must answer a ping, or end a running step, for `/health` to be 200.",
        "Server", minimum=0.1, maximum=3600,
    )  # fmt: skip
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests may take to end after SIGTERM; 0 ends them at once, as SIGINT does.",
        "Server", minimum=0, maximum=86400,
    )  # fmt: skip
    log_level: LogLevel = option("info", "Least severe log lines to print.", "Server")
    log_format: LogFormat = option("text", "Form of the log's lines; each an object with `json`.", "Server")
    enable_log_requests: bool = option(
        False, "Log a line for each request when it has ended: id, status, time; never what it says.", "Server"
    )
    disable_log_stats: bool = option(
        False, "Log no line with the server's figures every ten seconds in which something ran.", "Server"
    )

    # --- parallelism
    tensor_parallel_size: int = option(
        1, "Worker processes that share each layer of the model.", "Parallelism", short="-tp", minimum=1
    )
    data_parallel_size: int = option(
        1, "Engines, each with its own copy of the model.", "Parallelism", short="-dp", minimum=1
    )
    collective_timeout: float = option(
        60.0,
        "Seconds after which a collective between workers is given up, or a request whose media do not reach "
        "them (30 at most).",
        "Parallelism",
        minimum=1,
    )

    # --- scheduling
    max_num_seqs: int = option(64, "Most sequences computed in one step.", "Scheduling", minimum=1)
    max_num_batched_tokens: int | None = option(
        None, "Most tokens computed in one step, media tokens in the vision tower among them; longer prompts are "
        "computed in chunks. Default: 512 on the CPU, 2048 on CUDA.", "Scheduling", minimum=1,
    )  # fmt: skip
    long_prefill_token_threshold: int | None = option(
        None, "Most tokens of one prompt computed in one step while other prompts wait; 0: no such bound. "
        "Default: half of --max-num-batched-tokens.", "Scheduling", minimum=0,
    )  # fmt: skip
    max_num_encoder_input_tokens: int | None = option(
        None, "Most media tokens encoded in one step; a longer video is encoded over several steps. "
        "Default: --max-num-batched-tokens.", "Scheduling", minimum=1,
    )  # fmt: skip
    encoder_cache_tokens: int = option(
        65536, "Most media tokens whose embeddings the workers keep, for running requests and for those to come; "
        "also the most that one prompt may hold.", "Scheduling", minimum=1,
    )  # fmt: skip
    enable_prefix_caching: bool = option(
        True, "Keep the KV blocks of finished requests, for prompts that begin alike.", "Scheduling"
    )
    block_size: int = option(16, "Tokens in one block of the KV cache.", "Scheduling", minimum=1)
    kv_cache_memory_bytes: int | None = option(
        None, "Size of each worker's KV cache, such as 512M or 4G; default: 1G on the CPU, "
        "--gpu-memory-utilization on CUDA.", "Scheduling", parse=parse_bytes, minimum=1,
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9, "Share of a CUDA device's memory that weights and KV cache may take together; no effect on the CPU.",
        "Scheduling", minimum=0.05, maximum=1.0,
    )  # fmt: skip
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV-cache blocks, on any device, whatever the memory.", "Scheduling", minimum=1
    )

    async_scheduling: bool = option(
        True, "Schedule and dispatch the next step while the workers run the present one.", "Scheduling"
    )

    # --- media
    allowed_local_media_path: str | None = option(
        None, "Directory below which `file://` media may be read; without it none may.", "Media"
    )
    allowed_media_domains: list[str] = option(
        [], "Hosts from which `http(s)://` media may be fetched; without it none may. All addresses of a host must "
        "be public; an address, such as 127.0.0.1:8080, is allowed as it stands.", "Media",
        metavar="HOST[:PORT]",
    )  # fmt: skip
    allow_media_redirects: bool = option(False, "Follow redirects to other hosts of --allowed-media-domains.", "Media")
    media_fetch_timeout: float = option(
        30.0, "Seconds within which an `http(s)://` item must be fetched.", "Media", minimum=0.1, maximum=3600
    )
    limit_mm_per_prompt: dict[str, int] = option(
        {}, 'Most items of each modality in one prompt, such as \'{"video": 1}\'; default: no limit.', "Media",
        parse=parse_json_object, metavar="JSON",
    )  # fmt: skip
    media_io_kwargs: dict[str, dict[str, Any]] = option(
        {}, 'How media are read, such as \'{"video": {"num_frames": 10}}\' or \'{"video": {"fps": 2}}\'; '
        "default: the model's own sampling.", "Media", parse=parse_json_object, metavar="JSON",
    )  # fmt: skip
    mm_processor_kwargs: dict[str, Any] = option(
        {}, "Arguments for the model's Hugging Face processor, such as "
        '\'{"size": {"shortest_edge": 3136, "longest_edge": 50176}}\'.', "Media",
        parse=parse_json_object, metavar="JSON",
    )  # fmt: skip
    maximum_concurrent_videos: int = option(
        64, "Most videos per API server admitted to decoding and processing at once; more wait in line.", "Media",
        minimum=1,
    )  # fmt: skip
    max_num_queued_reqs: int = option(
        4096, "Most requests per API server that are not finished yet, whatever they wait for; "
        "one more is refused with 429.", "Media", minimum=1,
    )  # fmt: skip
    max_inflight_media_gb: float = option(
        4.0, "Most encoded images and videos per API server, in GiB, that requests hold until an engine has taken "
        "them over; reserved before they are fetched. A request that finds no room is refused with 429.", "Media",
        minimum=0.001,
    )  # fmt: skip
    max_request_bytes: int = option(
        1 << 30, "Longest body of a request, such as 64M; what it holds in `data:` URLs is 4/3 of its size.", "Media",
        parse=parse_bytes, minimum=1,
    )  # fmt: skip
    max_media_bytes: int = option(
        256 << 20, "Largest encoded image or video accepted, such as 64M.", "Media", parse=parse_bytes, minimum=1
    )
    max_image_pixels: int = option(ImageLimits.max_image_pixels, "Most pixels of an image.", "Media", minimum=1)
    max_frame_pixels: int = option(DecodeLimits.max_frame_pixels, "Most pixels of a video's frame.", "Media", minimum=1)
    max_video_seconds: float = option(
        DecodeLimits.max_video_seconds, "Longest video, in seconds.", "Media", minimum=0.1
    )
    max_video_frames: int = option(DecodeLimits.max_video_frames, "Most frames of a video file.", "Media", minimum=1)
    max_video_frames_kept: int = option(
        DecodeLimits.max_video_frames_kept, "Most frames that may be sampled from a video.", "Media", minimum=1
    )
    max_video_pixels_kept: int = option(
        DecodeLimits.max_video_pixels_kept, "Most pixels of all frames sampled from a video.", "Media", minimum=1
    )
    media_decode_timeout: float = option(
        DecodeLimits.media_decode_timeout, "Seconds within which an image or video must be decoded.", "Media",
        minimum=0.1, maximum=3600,
    )  # fmt: skip
    allow_partial_video: bool = option(
        False, "Answer about a video that is cut short or damaged from what can be read of it, with a warning; "
        "otherwise it is refused.", "Media",
    )  # fmt: skip

    # --- data plane
    mm_tensor_ipc: TensorIpc = option(
        "auto", "How media tensors that are not in the cache's shared memory reach the workers: `torch_shm` (shared "
        "memory), `direct_rpc` (copied through a socket), or `auto`: the first that passes its probe.", "Data plane",
    )  # fmt: skip
    mm_processor_cache_type: MediaCacheType = option(
        "auto", "Where processed media are kept for requests that bring them again: `shm` (in shared memory, once for "
        "all workers), `lru` (a copy in each worker), or `auto`: `shm` where the host allows it.", "Data plane",
    )  # fmt: skip
    mm_processor_cache_gb: float | None = option(
        None, "Most memory for them, in GiB: of all API servers together (shm), or of each worker (lru). "
        "Default: 4, or a quarter of the free memory where that is less; 0 turns it off.", "Data plane", minimum=0,
    )  # fmt: skip
    mm_shm_cache_max_object_size_mb: int = option(
        128, "Largest item kept in shared memory, in MiB; a larger one is handed to the workers uncached.",
        "Data plane", minimum=1,
    )  # fmt: skip
    mm_ipc_memory_bytes: int = option(
        1 << 30, "Most memory per API server and engine for tensors on their way to the workers; "
        "a request that finds none waits.", "Data plane", parse=parse_bytes, minimum=1 << 20,
    )  # fmt: skip

    def validate(self) -> None:
        """Raises ConfigError for the first value that is out of range or does not fit the others."""
        for field in fields():
            check_range(field, getattr(self, field.name))
        for modality, limit in self.limit_mm_per_prompt.items():
            if modality not in ("image", "video") or not isinstance(limit, int) or limit < 0:
                raise ConfigError(
                    f"--limit-mm-per-prompt: {modality!r}: {limit!r} is not one of image, video with a count >= 0"
                )
        for modality, kwargs in self.media_io_kwargs.items():
            if modality not in ("image", "video") or not isinstance(kwargs, dict):
                raise ConfigError(f"--media-io-kwargs: {modality!r} must be image or video, with a JSON object")
        for host in self.allowed_media_domains:
            try:
                parse_allowed_host(host)
            except ValueError as error:
                raise ConfigError(f"--allowed-media-domains: {error}") from None
        self._validate_http()
        for flag, path in (
            ("--chat-template", self.chat_template),
            ("--ssl-keyfile", self.ssl_keyfile),
            ("--ssl-certfile", self.ssl_certfile),
            ("--ssl-ca-certs", self.ssl_ca_certs),
        ):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag}: {path} is not a file")
        if self.allowed_local_media_path is not None and not Path(self.allowed_local_media_path).is_dir():
            raise ConfigError(f"--allowed-local-media-path: {self.allowed_local_media_path} is not a directory")

    def _validate_http(self) -> None:
        if not all(self.api_key):
            raise ConfigError("--api-key: a key must not be empty; leave the flag out to ask for none")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path: {self.root_path!r} must begin with a slash and not end with one")
        if self.uds is not None and (self.host, self.port) != (EngineConfig.host, EngineConfig.port):
            raise ConfigError("--uds: a unix socket has neither --host nor --port; keep one of them")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile: TLS needs both of them")
        if (self.ssl_ca_certs is None) != (self.ssl_cert_reqs == 0) or (self.ssl_ca_certs and not self.ssl_certfile):
            raise ConfigError("--ssl-ca-certs and --ssl-cert-reqs 1 or 2 need each other, and --ssl-certfile")
        narrowed = (self.allowed_methods, self.allowed_headers, self.allow_credentials) != (["*"], ["*"], False)
        if narrowed and not self.allowed_origins:
            raise ConfigError("--allowed-methods, --allowed-headers and --allow-credentials need --allowed-origins")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials: name the --allowed-origins; with * any page could use them")

    @property
    def served_names(self) -> list[str]:
        """Names by which clients may ask for the model; the first is the one in responses."""
        default = "mini-engine-demo" if self.model == BUNDLED_MODEL else self.model
        return self.served_model_name or [default]


def fields() -> list[dataclasses.Field[Any]]:
    """The fields of `EngineConfig`, each with an `Option` under `metadata["option"]`."""
    return list(dataclasses.fields(EngineConfig))


def field_types() -> dict[str, Any]:
    """The resolved type of each field by name."""
    return get_type_hints(EngineConfig)


def flag_of(name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    """`max_num_seqs` -> `MINI_ENGINE_MAX_NUM_SEQS`."""
    return ENV_PREFIX + name.upper()


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises ConfigError when `value` is outside the field's limits or choices."""
    opt: Option = field.metadata["option"]
    choices = get_args(field_types()[field.name]) if isinstance(value, str) else ()
    if choices and all(isinstance(choice, str) for choice in choices) and value not in choices:
        raise ConfigError(f"{flag_of(field.name)}: {value!r} is not one of {', '.join(choices)}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not (math.isfinite(value) and abs(value) < 2**63):
            raise ConfigError(f"{flag_of(field.name)}: {value} is not a number below 2**63")
        if opt.minimum is not None and value < opt.minimum:
            raise ConfigError(f"{flag_of(field.name)}: {value} is below the least value, {opt.minimum}")
        if opt.maximum is not None and value > opt.maximum:
            raise ConfigError(f"{flag_of(field.name)}: {value} is above the greatest value, {opt.maximum}")


def from_environment(environ: dict[str, str] | None = None) -> dict[str, str]:
    """Values given by `MINI_ENGINE_<FIELD>`, unparsed, by field name."""
    environ = dict(os.environ) if environ is None else environ
    return {field.name: environ[env_of(field.name)] for field in fields() if env_of(field.name) in environ}
