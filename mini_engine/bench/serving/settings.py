"""What the flags mean together: checked settings, and a reason for each flag that cannot be used."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mini_engine.bench.datasets import READ
from mini_engine.bench.datasets.sample import DataSettings
from mini_engine.bench.files import check_file, check_folder
from mini_engine.bench.parser import split_flags
from mini_engine.bench.serving.figures import Measures
from mini_engine.bench.serving.flags import BACKENDS, RANDOM_TOKENS, fits_header
from mini_engine.bench.serving.media import HOST, MediaTransport
from mini_engine.cli import settle
from mini_engine.config import ConfigError

SYNTHETIC_CONCURRENCY = 8


@dataclass(frozen=True)
class Output:
    """Where results go beside stdout; the fields are the flags of these names."""

    save_result: bool
    save_detailed: bool
    result_dir: Path
    result_filename: str | None
    metadata: dict[str, str]
    plot: Path | None
    label: str | None


@dataclass(frozen=True)
class Settings:
    """A benchmark, all of whose flags fit each other. A field that is not explained is the flag of its name."""

    data: DataSettings
    measures: Measures
    output: Output
    launch: list[str] | None  # flags of the server to start; None if one runs at `root`
    root: str  # URL without a slash at the end
    backend: str
    endpoint: str
    model: str | None  # in requests
    tokenizer: str | None  # that was named, by itself or with the model
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    cancel_rate: float
    ignore_eos: bool
    request_timeout: float
    sampling: dict[str, float]  # fields of a request
    logprobs: int | None
    extra_body: Mapping[str, Any]
    more_headers: dict[str, str]
    ready_seconds: float  # for which a server that runs may not answer yet
    media_transport: MediaTransport
    media_dir: Path | None
    media_port: int

    @property
    def headers(self) -> dict[str, str]:
        """With the key that OpenAI's own clients take from the environment."""
        key = os.environ.get("OPENAI_API_KEY")
        return {**({"Authorization": f"Bearer {key}"} if key else {}), **self.more_headers}


def settings_of(args: argparse.Namespace) -> Settings:
    """From parsed flags.

    Raises:
        ConfigError: a flag is of no use with the others; says which, why, and what to do.
    """
    _check_data(args)
    _check_rest(args)
    _check_output(args)
    limited = args.dataset_name.startswith("synthetic") and math.isinf(args.request_rate)
    host = args.host or "127.0.0.1"
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host  # an IPv6 address
    root = args.base_url or f"http://{host}:{args.port or 8000}"
    return _by_name(
        Settings,
        args,
        data=_data(args),
        measures=Measures(args.percentile_metrics, args.metric_percentiles, dict(args.goodput)),
        output=_by_name(Output, args, result_dir=args.result_dir or Path(), metadata=dict(args.metadata)),
        launch=None if args.launch is None else server_flags("--launch", args.launch),
        root=root.rstrip("/"),
        endpoint=args.endpoint or BACKENDS[args.backend],
        model=args.served_model_name or args.model,
        tokenizer=args.tokenizer or args.model,
        burstiness=args.burstiness or 1.0,
        max_concurrency=args.max_concurrency or (SYNTHETIC_CONCURRENCY if limited else None),
        sampling={
            name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(args, name)) is not None
        },
        more_headers=dict(args.header),
        ready_seconds=args.ready_check_timeout_sec or 0.0,
        media_port=args.media_port or 0,
    )


Made = TypeVar("Made", Output, Settings)


def _by_name(kind: type[Made], args: argparse.Namespace, **values: Any) -> Made:
    """A dataclass of these values; fields that are not among them are the flags of their names."""
    flags = {field.name: getattr(args, field.name) for field in fields(kind) if field.name not in values}
    return kind(**values, **flags)


def server_flags(name: str, text: str) -> list[str]:
    """The flags of serve.py in a text.

    Raises:
        ConfigError: serve.py would not take them; `name` is where they stand.
    """
    flags = split_flags(name, text)
    try:
        asked = settle(flags, os.environ)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if asked.print_config:
        raise ConfigError(
            f"{name}: --print-config: a server that only shows its settings cannot be measured; leave it out"
        )
    if asked.config.uds:
        raise ConfigError(f"{name}: --uds: the client reaches its server by a port of its own choice; leave it out")
    return flags


def _data(args: argparse.Namespace) -> DataSettings:
    return DataSettings(
        name=args.dataset_name,
        count=args.num_prompts,
        warm_ups=args.num_warmups,
        seed=args.seed,
        output_tokens=args.sharegpt_output_len or args.hf_output_len or args.output_len,
        unique_ratio=1.0 if args.unique_ratio is None else args.unique_ratio,
        path=args.dataset_path,
        subset=args.hf_subset,
        split=args.hf_split,
        shuffle=not args.disable_shuffle,
        oversample=not args.no_oversample,
        buckets=args.random_mm_bucket_config,
        items_per_prompt=args.random_mm_base_items_per_request or 1,
        input_tokens=args.input_len or (RANDOM_TOKENS if args.dataset_name == "random" else None),
        prefix_tokens=args.random_prefix_len or 0,
        range_ratio=args.random_range_ratio or 0.0,
        tokenizer=args.tokenizer or args.model,
        progress=not args.disable_tqdm,
    )


def _check_data(args: argparse.Namespace) -> None:
    name = args.dataset_name
    file = "it is made here and not read from a file; leave it out, or choose --dataset-name " + ", ".join(READ)
    _refuse(name not in READ, name, file, dataset_path=args.dataset_path, disable_shuffle=args.disable_shuffle,
            no_oversample=args.no_oversample)  # fmt: skip
    if name in READ and not args.dataset_path:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path")
    _refuse(name != "hf", name, "it is a flag of --dataset-name hf", hf_subset=args.hf_subset,
            hf_split=args.hf_split, hf_output_len=args.hf_output_len)  # fmt: skip
    _refuse(name != "sharegpt", name, "it is a flag of --dataset-name sharegpt; use --output-len",
            sharegpt_output_len=args.sharegpt_output_len)  # fmt: skip
    if args.output_len and (args.sharegpt_output_len or args.hf_output_len):
        raise ConfigError(f"--output-len and --{name}-output-len mean the same: keep one of them")
    _check_lengths(args)
    _refuse(
        name in ("text", "random"), name, "texts have no media that could be repeated", unique_ratio=args.unique_ratio
    )
    _refuse(name != "random-mm", name, "it is a flag of --dataset-name random-mm",
            random_mm_bucket_config=args.random_mm_bucket_config,
            random_mm_base_items_per_request=args.random_mm_base_items_per_request)  # fmt: skip
    if name == "random-mm" and args.random_mm_bucket_config is None:
        example = "'{(256, 256, 1): 0.5, (480, 640, 16): 0.5}'"
        raise ConfigError(f"--dataset-name random-mm needs --random-mm-bucket-config, such as {example}")
    if args.backend == "openai" and (name.startswith("synthetic") or name == "random-mm"):
        raise ConfigError(f"--backend openai: {name} has media, which only --backend openai-chat takes")


def _check_lengths(args: argparse.Namespace) -> None:
    name = args.dataset_name
    _refuse(name not in ("random", "text", "random-mm"), name, "lengths are chosen for random, text and random-mm",
            input_len=args.input_len, random_prefix_len=args.random_prefix_len,
            random_range_ratio=args.random_range_ratio)  # fmt: skip
    _refuse(name != "random" and args.input_len is None, name, "it needs --input-len",
            random_prefix_len=args.random_prefix_len, random_range_ratio=args.random_range_ratio)  # fmt: skip


def _check_rest(args: argparse.Namespace) -> None:
    _check_target(args)
    if not fits_header(os.environ.get("OPENAI_API_KEY", "")):
        raise ConfigError("OPENAI_API_KEY: its value has characters that no header can have, such as the end of a line")
    if args.burstiness is not None and math.isinf(args.request_rate):
        raise ConfigError("--burstiness is of the times between requests: it needs a --request-rate")
    if args.media_dir is not None and args.media_transport == "data":
        raise ConfigError("--media-dir: no files are made with --media-transport data; choose file or http")
    if args.media_dir is not None and not args.media_dir.is_dir():
        raise ConfigError(f"--media-dir: {args.media_dir} is not a directory; make it first")
    if args.media_port is not None and args.media_transport != "http":
        raise ConfigError("--media-port: there is a file server only with --media-transport http")
    if args.launch is None and args.media_transport == "file" and args.media_dir is None:
        raise ConfigError("--media-transport file: the server must be allowed to read the files. Give --media-dir DIR, "
                          "and start the server with --allowed-local-media-path DIR")  # fmt: skip
    if args.launch is None and args.media_transport == "http" and args.media_port is None:
        raise ConfigError("--media-transport http: the server must be allowed to fetch the files. Give --media-port "
                          f"PORT, and start the server with --allowed-media-domains {HOST}:PORT")  # fmt: skip


def _check_target(args: argparse.Namespace) -> None:
    if args.base_url and (args.host or args.port):
        raise ConfigError("--base-url says where the server is: leave out --host and --port")
    if args.launch is not None and (args.base_url or args.host or args.port):
        raise ConfigError("--launch starts a server on a port of its own: leave out --base-url, --host and --port")
    if args.launch is not None and args.ready_check_timeout_sec is not None:
        raise ConfigError("--ready-check-timeout-sec: a server of --launch is waited for as long as it starts")
    endpoint = args.endpoint or BACKENDS[args.backend]
    if args.base_url:
        path = urlsplit(args.base_url).path.rstrip("/")
        if path and endpoint.startswith(f"{path}/"):
            raise ConfigError(f"--base-url: --endpoint {endpoint} begins with {path} already: leave it out of the URL")
    chat = endpoint.rstrip("/").endswith("/chat/completions")
    other = next(name for name in BACKENDS if name != args.backend)
    if endpoint.rstrip("/").endswith("/completions") and chat != (args.backend == "openai-chat"):
        raise ConfigError(f"--endpoint {endpoint} is of --backend {other}, not of {args.backend}: choose that one, or "
                          f"leave out --endpoint, which then is {BACKENDS[args.backend]}")  # fmt: skip


def _check_output(args: argparse.Namespace) -> None:
    """Before anything is measured, which may take long."""
    given = {"--save-detailed": args.save_detailed, "--result-dir": args.result_dir,
             "--result-filename": args.result_filename, "--metadata": args.metadata,
             "--label": args.label}  # fmt: skip
    for flag, value in given.items():
        if value and not args.save_result:
            raise ConfigError(f"{flag}: nothing is written without --save-result")
    if args.save_detailed and Path(args.result_filename or "").suffix == ".jsonl":
        raise ConfigError(f"--result-filename: {args.result_filename} is where --save-detailed writes its lines; "
                          "give the file of the figures another ending, such as .json")  # fmt: skip
    if args.save_result:
        path = (args.result_dir or Path()) / (args.result_filename or "named by its time")
        check_folder("--result-dir", path.parent)
        if args.result_filename and path.parent.is_dir():
            check_file("--result-filename", path)
    if args.plot is not None:
        check_file("--plot", args.plot)


def _refuse(wrong: bool, name: str, why: str, **values: Any) -> None:
    """Raises ConfigError for the first of the flags that was given although it is of no use."""
    for flag, value in values.items():
        if wrong and value is not None and value is not False:
            raise ConfigError(f"--{flag.replace('_', '-')} cannot be used with --dataset-name {name}: {why}")
