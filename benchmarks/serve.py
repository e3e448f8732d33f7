"""What clients of an OpenAI-compatible server wait for, with the flags and result files of vLLM's `bench serve`.

Without flags it asks the server on port 8000 about 100 synthetic videos of the kind that the bundled model knows, 8 at
a time, and shows how many answers were right beside how fast they came. Prompts are made, and media encoded, before any
clock runs; answers are streamed, and greedy without --temperature. docs/benchmarks.md explains each metric.
"""

import argparse
import datetime
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import metrics
from benchmarks.cli import Report, environment, say
from benchmarks.client import Interrupted, Run, Target, arrivals, send_all
from benchmarks.datasets import NAMES, READ, Prompt, Prompts, draws, load
from benchmarks.server import ENDPOINTS, memory_mb, open_target, peak_memory
from mini_engine.config import ConfigError

SYNTHETIC_CONCURRENCY = 8
SEEDS = 10**6  # of which a run without --seed draws one
USED_BY = {  # flags that only some data sets use
    "dataset_path": READ,
    "no_oversample": READ,
    "disable_shuffle": READ,
    "input_len": ("random", "random-mm"),
    "random_prefix_len": ("random", "random-mm"),
    "random_range_ratio": ("random", "random-mm"),
    "random_mm_bucket_config": ("random-mm",),
    "random_mm_base_items_per_request": ("random-mm",),
    "unique_ratio": tuple(name for name in NAMES if name != "random"),
}


@dataclass(frozen=True)
class Measured:
    """A run of these prompts, and its metrics, which are plain data."""

    prompts: Prompts
    run: Run
    results: dict[str, Any]
    failures: list[str]


def run(args: argparse.Namespace) -> Report:
    """Measure one server."""
    check(args)
    measured = measure(args)
    return Report(measured.results, measured.failures)


def measure(args: argparse.Namespace, label: str = "", prompts: Prompts | None = None) -> Measured:
    """Send the prompts (by default those of the flags) to the server, print the table and write the file of
    --save-result, of what has run also after Ctrl-C. `label` tells one of several runs from the others."""
    interrupted: Interrupted | None = None
    with open_target(args) as target:
        prompts = prompts or load(args, target.model)
        requests = requests_of(args, target, prompts.measured)
        starts = arrivals(len(requests), args.request_rate, args.burstiness, draws(args.seed, "arrivals"))
        failures = []
        memory = {"start_memory_mb": memory_mb(target.pid)} if target.pid else {}
        if warm_ups := requests_of(args, target, prompts.warm_ups):
            before = send_all(target, warm_ups, [0.0] * len(warm_ups), args.max_concurrency)
            failures = [f"warm-up: {failure}" for failure in metrics.failures(before.outcomes)]
        with peak_memory(target.pid, memory):
            try:
                run = send_all(target, requests, starts, args.max_concurrency)
            except Interrupted as error:
                run, interrupted = error.run, error
    failures += metrics.failures(run.outcomes)
    # With --ignore-eos an answer would go on after its end.
    answers = [None if args.ignore_eos else prompt.answer for prompt in prompts.measured]
    results = {
        "model": target.model,
        "max_concurrency": args.max_concurrency,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "seed": args.seed,
        **metrics.compute(run, answers, args.metric_percentiles, dict(args.goodput)),
        **memory,
    }
    print(f"{label}\n" * bool(label) + metrics.describe(results, args.percentile_metrics), flush=True)
    if args.save_result:
        save(args, run, results, label)
    if interrupted is not None:
        raise interrupted
    return Measured(prompts, run, results, [f"{label}: {failure}" if label else failure for failure in failures])


# --- flags ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags, by group. A flag whose absence matters has the default None."""
    add = parser.add_argument_group("server").add_argument
    add("--launch", metavar="FLAGS", help='Start a server of this project with these flags, such as "-tp 2" or "".')
    text = "API of the server (default: openai-chat; openai or vllm: completions)."
    add("--backend", "--endpoint-type", choices=ENDPOINTS, default="openai-chat", help=text)
    add("--base-url", metavar="URL", help="URL of the server, with or without /v1, instead of --host and --port.")
    add("--host", help="Address of the server (default: 127.0.0.1).")
    add("--port", type=int, help="Port of the server (default: 8000).")
    add("--endpoint", metavar="PATH", help="API path; default: that of the backend, such as /v1/chat/completions.")
    add("--model", help="Model name in requests; default: the first name of /v1/models.")
    add("--served-model-name", metavar="NAME", help="Model name in requests, if --model names the tokenizer.")
    add("--header", type=pair, nargs="+", default=[], metavar="KEY=VALUE", help="Additional HTTP headers.")
    text = "Seconds to wait until the server answers (default: 0)."
    add("--ready-check-timeout-sec", type=float, default=0.0, metavar="SECONDS", help=text)
    text = "Directory or hub name of the tokenizer that random texts and the lengths of a data set's own answers need"
    add("--tokenizer", metavar="NAME", help=f"{text} (default: --model, or the server's name of it).")
    add = parser.add_argument_group("prompts").add_argument
    add("--dataset-name", choices=NAMES, default="synthetic-video", help="Data set (default: synthetic-video).")
    add("--dataset-path", metavar="PATH", help="JSON file of sharegpt or custom.")
    add("--num-prompts", type=int, default=100, help="Number of requests (default: 100).")
    add("--num-warmups", type=int, default=4, help="Unmeasured requests before, with other media (default: 4).")
    names = ("--output-len", "--random-output-len", "--custom-output-len", "--sharegpt-output-len")
    text = "32 for synthetic ones, as many as the record's own answer has for files, else 128"
    add(*names, type=int, metavar="TOKENS", help=f"Maximum output tokens; default: {text}.")
    text = (
        "Length of the text of random (default: 1024), and of random-mm without a chat's template (a short question)."
    )
    add("--input-len", "--random-input-len", type=int, metavar="TOKENS", help=text)
    text = "Length of a prefix that all prompts share (default: 0)."
    add("--random-prefix-len", type=int, metavar="TOKENS", help=text)
    text = "Random variation of input and output lengths, as a fraction (default: 0)."
    add("--random-range-ratio", type=float, metavar="SHARE", help=text)
    text = "Sizes of random-mm with their weights, as {(height, width, frames): weight, ...}; one frame is an image."
    add("--random-mm-bucket-config", metavar="DICT", help=f"{text} Sizes of videos are even.")
    add("--random-mm-base-items-per-request", type=int, metavar="N", help="Items per prompt of random-mm (default: 1).")
    text = "Fraction of prompts with new media; the others repeat media of earlier ones"
    add("--unique-ratio", type=float, metavar="SHARE", help=f"{text}, or whole prompts from files (default: 1).")
    add("--no-oversample", action="store_true", help="Do not repeat prompts if the file has too few; send fewer.")
    add("--disable-shuffle", action="store_true", help="Keep the order of a file's records.")
    text = "Random seed (default: a new one in each run, whose prompts no cache holds)."
    add("--seed", type=int, default=random.randrange(SEEDS), help=text)
    _add_traffic_and_results(parser)


def _add_traffic_and_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("traffic").add_argument
    add("--request-rate", type=float, default=math.inf, metavar="N", help="Requests per second (default: inf).")
    text = "Shape of the gamma distribution of the times between requests: 1 is a Poisson process, lower is burstier"
    add("--burstiness", type=float, default=1.0, metavar="SHAPE", help=f"{text} (default: 1).")
    text = "Maximum requests in flight; default: 8 for synthetic data sets without --request-rate, else no limit."
    add("--max-concurrency", type=int, metavar="N", help=text)
    add("--temperature", type=float, default=0.0, metavar="T", help="Sampling temperature (default: 0, greedy).")
    add("--top-p", type=float, metavar="SHARE", help="Nucleus sampling.")
    add("--top-k", type=int, metavar="N", help="Top-k sampling.")
    add("--logprobs", type=int, metavar="N", help="Number of most likely tokens to return per output token.")
    add("--ignore-eos", action="store_true", help="Generate the maximum of output tokens.")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="Additional fields of the request body.")
    add = parser.add_argument_group("results").add_argument
    text = "Latencies in the table, of ttft, tpot, itl and e2el (default: ttft,tpot,itl)."
    add("--percentile-metrics", type=metric_names, default=["ttft", "tpot", "itl"], metavar="NAMES", help=text)
    text = "Percentiles to report, such as 50,90,99 (default: 99)."
    add("--metric-percentiles", type=percentiles, default=[99.0], metavar="NUMBERS", help=text)
    text = "Goodput limits of ttft, tpot or e2el in ms, such as ttft:500 e2el:2000."
    add("--goodput", type=limit, nargs="+", default=[], metavar="NAME:MS", help=text)
    add("--save-result", action="store_true", help="Write the metrics to a JSON file.")
    add("--save-detailed", action="store_true", help="Add each request's times and text to that file.")
    add("--result-dir", type=Path, metavar="DIR", help="Directory of that file (default: the current one).")
    add("--result-filename", metavar="NAME", help="Its name; default: from backend, rate, concurrency, model, time.")
    add("--label", metavar="NAME", help="Label in the file, and prefix of its name instead of the backend.")
    add("--metadata", type=pair, nargs="+", default=[], metavar="KEY=VALUE", help="Additional keys of the file.")
    add("--disable-tqdm", action="store_true", help="Hide the progress bar, which only a terminal shows.")


def pair(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, value = text.split("=", 1)
    return key, value


def metric_names(text: str) -> list[str]:
    """Names of latencies between commas."""
    if unknown := set(text.split(",")) - set(metrics.METRICS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(metrics.METRICS)}")
    return text.split(",")


def percentiles(text: str) -> list[float]:
    """Numbers between commas."""
    return [float(value) for value in text.split(",")]


def limit(text: str) -> tuple[str, float]:
    """A metric of one request and its limit in milliseconds."""
    name, milliseconds = text.split(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{text} is not ttft, tpot or e2el with a limit, such as ttft:500")
    return name, float(milliseconds)


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that would have no effect beside the others, or lacks another; before anything that
    takes long. Fills in what follows from other flags."""
    name = args.dataset_name
    for flag, names in USED_BY.items():
        if name not in names and getattr(args, flag) is not None and getattr(args, flag) is not False:
            where = f"--dataset-name {name}; only on {', '.join(names)}"
            raise ConfigError(f"--{flag.replace('_', '-')} has no effect on {where}")
    for needed, names in (("dataset_path", READ), ("random_mm_bucket_config", ("random-mm",))):
        if name in names and getattr(args, needed) is None:
            raise ConfigError(f"--dataset-name {name} needs --{needed.replace('_', '-')}")
    if (args.launch is not None) + (args.base_url is not None) + bool(args.host or args.port) > 1:
        raise ConfigError("--launch, --base-url, and --host with --port exclude each other")
    if args.burstiness != 1 and math.isinf(args.request_rate):
        raise ConfigError("--burstiness needs --request-rate")
    given = (args.save_detailed, args.result_dir, args.result_filename, args.label, args.metadata)
    if any(given) and not args.save_result:
        raise ConfigError("--save-detailed, --result-dir, --result-filename, --label and --metadata need --save-result")
    if args.max_concurrency is None and name.startswith("synthetic") and math.isinf(args.request_rate):
        args.max_concurrency = SYNTHETIC_CONCURRENCY


# --- one run --------------------------------------------------------------------------------------------------------


def requests_of(args: argparse.Namespace, target: Target, prompts: list[Prompt]) -> list[bytes]:
    """The body of a request for each prompt.

    Raises:
        ConfigError: a prompt with media, or a conversation, for --backend openai.
    """
    chat = args.backend == "openai-chat"
    common: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    common |= {name: value for name, value in sampling.items() if value is not None}
    if args.logprobs is not None:
        common |= {"logprobs": True, "top_logprobs": args.logprobs} if chat else {"logprobs": args.logprobs}
    if args.ignore_eos:
        common["ignore_eos"] = True
    if target.timings:
        common["return_timings"] = True
    bodies = []
    for prompt in prompts:
        if chat:
            fields: dict[str, Any] = {"messages": prompt.messages, "max_completion_tokens": prompt.output_tokens}
        elif prompt.urls or len(prompt.messages) > 1:
            raise ConfigError(f"--backend {args.backend} takes one text for each prompt; use --backend openai-chat")
        else:
            fields = {"prompt": prompt.text, "max_tokens": prompt.output_tokens}
        bodies.append(json.dumps({**fields, **common, **args.extra_body}).encode())
    return bodies


def save(args: argparse.Namespace, run: Run, results: dict[str, Any], label: str) -> None:
    """Write the file that --save-result asks for: one object by vLLM's keys; a `label` is a part of its name."""
    model, most = results["model"], f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    when = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{args.label or args.backend}-{args.request_rate:g}qps{most}-{Path(model).name}-{when}.json"
    path = (args.result_dir or Path()) / (args.result_filename or name)
    path = path.with_stem(f"{path.stem}-{label.replace('/', '_')}") if label else path
    result = {
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": args.tokenizer or args.model or model,
        "num_prompts": args.num_prompts,
        **dict(args.metadata),
        "burstiness": args.burstiness,
        **results,
        **environment(args),
    }
    if args.save_detailed:  # of each request, in the order of the prompts; times in seconds
        result |= {
            "input_lens": [outcome.prompt_tokens for outcome in run.outcomes],
            "output_lens": [outcome.output_tokens for outcome in run.outcomes],
            "start_times": [outcome.begun - run.begun for outcome in run.outcomes],
            "ttfts": [outcome.ttft if outcome.chunks else 0.0 for outcome in run.outcomes],
            "itls": [outcome.itls for outcome in run.outcomes],
            "generated_texts": [outcome.text for outcome in run.outcomes],
            "errors": [outcome.error or "" for outcome in run.outcomes],
            "stages": [outcome.stages for outcome in run.outcomes],
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, default=str) + "\n")
    say(f"wrote {path}")
