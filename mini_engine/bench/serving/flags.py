"""The flags of the regimes that send requests, by vLLM's names. What they mean together is checked in `settings.py`."""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mini_engine.bench import datasets
from mini_engine.bench.parser import at_least, real, whole

METRICS = ("ttft", "tpot", "itl", "e2el")
BACKENDS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}
RANDOM_TOKENS = 1024  # of a text of random
LEAST_RATE = 1e-9
MOST_SHAPE = 1e6
MOST_PROMPTS = 100_000  # of synthetic videos some GB
MOST_TOKENS = 1 << 24
MOST_ITEMS = 1000
MOST_SIDE = 1 << 14  # what H.264 holds
MOST_PIXELS = 1 << 30  # which take 3 GiB while a video is made
SHOWN = 200  # characters of a value in an error
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
Bucket = tuple[int, int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All of them, by group. A flag whose absence matters has the default None."""
    _add_target(parser.add_argument_group("server"))
    _add_data(parser.add_argument_group("prompts"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_results(parser.add_argument_group("results"))


def _add_target(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--launch", metavar="FLAGS", help='Start a server of this project with these flags, such as "-tp 2" or "".')
    add("--backend", "--endpoint-type", type=backend, choices=BACKENDS, default="openai-chat",
        help="API of the server (default: openai-chat; openai, also as vllm: texts without a chat).")  # fmt: skip
    add("--base-url", type=url, metavar="URL", help="Root of the server, instead of --host and --port.")
    add("--host", type=filled, help="Default: 127.0.0.1.")
    add("--port", type=port, help="Default: 8000.")
    add("--endpoint", type=endpoint, metavar="PATH", help="Default: that of the backend, such as /v1/chat/completions.")
    add("--model", type=filled, help="Name of the model in requests; default: the first that the server names.")
    add("--served-model-name", type=filled, metavar="NAME", help="That name, where --model is for the tokenizer.")
    add("--header", type=header, nargs="+", default=[], metavar="KEY=VALUE", help="More headers of each request.")
    add("--ready-check-timeout-sec", type=not_negative, metavar="SECONDS",
        help="How long to wait for a server that does not answer yet (default: 0).")  # fmt: skip
    add("--tokenizer", type=filled, metavar="NAME",
        help="Directory or hub name of the tokenizer that counts the tokens of a data set's own answers, and of a "
        "server's that does not count them; default: --model, and for a data set the server's name of it.")  # fmt: skip


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=datasets.NAMES, default="synthetic-video",
        help="Default: synthetic-video, which the bundled model knows.")  # fmt: skip
    add("--dataset-path", metavar="PATH", help="File of sharegpt or custom; file, folder or hub name of hf.")
    add("--hf-subset", metavar="NAME", help="Subset of a data set of the hub.")
    add("--hf-split", metavar="NAME", help="Split of a data set of hf (default: train).")
    add("--num-prompts", type=prompts(1), default=100, help="Default: 100.")
    add("--num-warmups", type=prompts(0), default=4,
        help="Requests before those that count, with media of their own (default: 4).")  # fmt: skip
    add("--output-len", "--random-output-len", "--custom-output-len", type=at_least(1), metavar="TOKENS",
        help="Most tokens to generate; default: 32 for synthetic ones, as many as the record's own answer has for "
        "files, else 128.")  # fmt: skip
    add("--sharegpt-output-len", type=at_least(1), metavar="TOKENS", help="The same, for sharegpt.")
    add("--hf-output-len", type=at_least(1), metavar="TOKENS", help="The same, for hf.")
    add("--input-len", "--random-input-len", type=at_least(1, MOST_TOKENS), metavar="TOKENS",
        help="Length of the text of random, text and random-mm, in words that are one token each, without a chat's "
        f"template (default: {RANDOM_TOKENS} for random, else a short question).")  # fmt: skip
    add("--random-prefix-len", type=at_least(0, MOST_TOKENS), metavar="TOKENS",
        help="Length of a text before it that is the same for all prompts (default: 0).")  # fmt: skip
    add("--random-range-ratio", type=share, metavar="SHARE",
        help="By which share the lengths of texts and answers are less or more, drawn (default: 0).")  # fmt: skip
    add("--no-oversample", action="store_true", help="Send fewer prompts where a file has too few, none again.")
    add("--disable-shuffle", action="store_true", help="Take the records of a file in their order.")
    add("--seed", type=at_least(0), default=0, help="Of all that is drawn (default: 0).")
    add("--unique-ratio", type=share, metavar="SHARE",
        help="Share of the prompts whose media no earlier prompt had; the others repeat one of these. Of files, whole "
        "prompts are repeated (default: 1).")  # fmt: skip
    add("--random-mm-bucket-config", type=buckets, metavar="DICT",
        help="Sizes of random-mm with their weights, as {(height, width, frames): weight, ...}; one frame is an image. "
        "Sizes of videos are even.")  # fmt: skip
    add("--random-mm-base-items-per-request", type=at_least(1, MOST_ITEMS), metavar="N", help="Default: 1.")
    add("--media-transport", choices=("data", "file", "http"), default="data",
        help="Media inside the request, as files for the server, or from a file server (default: data). URLs in a data "
        "set stay as they are.")  # fmt: skip
    add("--media-dir", type=Path, metavar="DIR", help="Where the folder of files is made.")
    add("--media-port", type=port, metavar="PORT", help="Port of the file server; default: a free one.")


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--request-rate", type=rate, default=math.inf, metavar="PER_SECOND", help="Default: inf, all at once.")
    add("--burstiness", type=shape, metavar="SHAPE",
        help="Shape of the gamma distribution of the times between requests: 1 is a Poisson process, less comes in "
        "bursts (default: 1).")  # fmt: skip
    add("--max-concurrency", type=at_least(1), metavar="N",
        help="Most requests at once; default: 8 for synthetic data sets without --request-rate, else any "
        "number.")  # fmt: skip
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="Default: 0, which is greedy.")
    add("--top-p", type=share, metavar="SHARE", help="Sent if given.")
    add("--top-k", type=at_least(-1), metavar="N", help="Sent if given.")
    add("--logprobs", type=at_least(0), metavar="N", help="Ask for those of so many tokens at each place.")
    add("--ignore-eos", action="store_true", help="Have each answer as long as it may be.")
    add("--cancel-rate", type=share, default=0.0, metavar="SHARE",
        help="Share of the streams that are closed after a few chunks, those of prompts with a known answer after one "
        "unless --ignore-eos is given (default: 0).")  # fmt: skip
    add("--request-timeout", type=positive, default=600.0, metavar="SECONDS",
        help="A request that has not ended by then has failed (default: 600).")  # fmt: skip
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="More fields of each request.")


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--percentile-metrics", type=metrics, default=METRICS, metavar="NAMES",
        help="Latencies to show (default: ttft,tpot,itl,e2el).")  # fmt: skip
    add("--metric-percentiles", type=percentiles, default=[99.0], metavar="NUMBERS",
        help="Such as 50,90,99 (default: 99).")  # fmt: skip
    add("--goodput", type=goodput, nargs="+", default=[], metavar="NAME:MS",
        help="Limits of ttft, tpot or e2el that good requests keep, such as ttft:500 e2el:2000.")  # fmt: skip
    add("--save-result", action="store_true", help="Write the figures to a JSON file.")
    add("--save-detailed", action="store_true",
        help="With each request's times and text, there and in a JSONL file beside it.")  # fmt: skip
    add("--result-dir", type=Path, metavar="DIR", help="Default: here.")
    add("--result-filename", type=filled, metavar="NAME", help="Default: from backend, rate, concurrency, model, time.")
    add("--label", metavar="NAME", help="For the results, and before the file's name instead of the backend.")
    add("--disable-tqdm", action="store_true", help="Show no progress.")
    add("--metadata", type=pair, nargs="+", default=[], metavar="KEY=VALUE", help="For the results.")
    add("--plot", type=Path, metavar="FILE", help="Draw latencies, throughput and stages, such as out.png.")


def prompts(least: int) -> Callable[[str], int]:
    """Reads a number of prompts."""
    return at_least(least, MOST_PROMPTS, "they are all made before the first is sent; send more in several runs, each "
                    "with a --seed of its own")  # fmt: skip


def filled(text: str) -> str:
    """A text that is not empty, as one from a variable may be that is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError("nothing is given; leave the flag out for the default")
    return text


def url(text: str) -> str:
    """The root of a server. A name and a password in it would be told with the results."""
    try:
        parts = urllib.parse.urlsplit(text)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if fine and "@" in parts.netloc:
        raise argparse.ArgumentTypeError("a URL with a name or a password in it is not taken; use --header")
    if not fine or parts.query or parts.fragment or re.search(r"\s", text):
        raise argparse.ArgumentTypeError(f"{text} is not like http://127.0.0.1:8000")
    return text


def endpoint(text: str) -> str:
    """The path below the root."""
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is no path such as /v1/chat/completions")
    return text


def port(text: str) -> int:
    """The number of a port that can be connected to."""
    if not 1 <= whole(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 65535")
    return whole(text)


def positive(text: str) -> float:
    """A number above 0; `inf` is one."""
    if not real(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return real(text)


def rate(text: str) -> float:
    """A number above 0 whose inverse is a time that can be waited for; `inf` is one."""
    if not real(text) >= LEAST_RATE:
        raise argparse.ArgumentTypeError(f"{text} is not at least {LEAST_RATE:g}")
    return real(text)


def shape(text: str) -> float:
    """That of a gamma distribution from which numbers can be drawn."""
    if not 1 / MOST_SHAPE <= real(text) <= MOST_SHAPE:
        raise argparse.ArgumentTypeError(f"{text} is not from {1 / MOST_SHAPE:g} to {MOST_SHAPE:g}")
    return real(text)


def not_negative(text: str) -> float:
    """A finite number that is not below 0."""
    if not 0 <= real(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return real(text)


def backend(text: str) -> str:
    """The name of an API, also by vLLM's for its own."""
    return "openai" if text == "vllm" else text


def share(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= real(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return real(text)


def metrics(text: str) -> tuple[str, ...]:
    """Names of latencies between commas."""
    names = tuple(text.split(","))
    if unknown := set(names) - set(METRICS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(METRICS)}")
    return names


def percentiles(text: str) -> list[float]:
    """Numbers from 0 to 100 between commas."""
    values = [real(value) for value in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: percentiles are from 0 to 100")
    return values


def goodput(text: str) -> tuple[str, float]:
    """A metric of one request and its limit in milliseconds."""
    name, colon, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or not colon or not 0 <= real(limit) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not ttft, tpot or e2el with a limit, such as ttft:500")
    return name, real(limit)


def pair(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text} is not KEY=VALUE")
    return key, value


def header(text: str) -> tuple[str, str]:
    """KEY=VALUE of a header. No error tells the value, of which any may be a key."""
    key, value = pair(text)
    if not HEADER_NAME.fullmatch(key):
        raise argparse.ArgumentTypeError(f"{key!r} is no name of a header")
    if not fits_header(value):
        raise argparse.ArgumentTypeError(f"the value of {key} has characters that no header can have")
    return key, value


def fits_header(value: str) -> bool:
    """Whether a header can have this value: text of Latin-1 on one line."""
    return HEADER_VALUE.fullmatch(value) is not None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, which has neither NaN nor infinity."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text[:SHOWN]} is not a JSON object, such as {{"min_p": 0.1}}')
    return value


def buckets(text: str) -> dict[Bucket, float]:
    """Sizes and weights in vLLM's form, a dictionary in Python's notation."""
    try:
        found = {
            (int(height), int(width), int(frames)): float(w) for (height, width, frames), w in _literal(text).items()
        }
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text} is not like {{(256, 256, 1): 0.5, (480, 640, 16): 0.5}}") from None
    if not found or not min(found.values()) >= 0 or not 0 < sum(found.values()) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: weights must be finite and not negative, and one above 0")
    for height, width, frames in found:
        if min(height, width, frames) < 1 or (frames > 1 and (height % 2 or width % 2)):
            raise argparse.ArgumentTypeError(f"({height}, {width}, {frames}): sizes are above 0, those of videos even")
        if max(height, width) > MOST_SIDE or height * width * frames > MOST_PIXELS:
            raise argparse.ArgumentTypeError(
                f"({height}, {width}, {frames}): at most {MOST_SIDE} to a side, and {MOST_PIXELS} pixels in all frames"
            )
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except SyntaxError as error:
        raise ValueError(str(error)) from None
