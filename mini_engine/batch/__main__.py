"""Answer a file of requests: `python -m mini_engine.batch -i requests.jsonl -o answers.jsonl [flags of serve.py]`.

Both files have OpenAI's batch format. A run that was stopped goes on where it stopped when the same command is given
again: answers in the second file are kept, but for those that are to be asked for again.
"""

import argparse
import collections
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from mini_engine.batch.request_files import AnswerFile, BatchRequest, answer_row, ids_of, read_requests
from mini_engine.batch.server_handle import MAX_CONCURRENCY, ServerError, ServerHandle, check_flags, root_of
from mini_engine.config import ConfigError

INTERRUPTED = 128 + signal.SIGINT
PROGRESS_SECONDS = 30.0  # between progress lines of a log; a terminal is written to ten times a second
FAILURES_SHOWN = 5  # the most frequent
# Stages of a response's `metrics` by what the progress line calls them.
STAGES = {"media_decode": "decode", "process": "decode"} | {name: name for name in ("encode", "prefill", "generation")}


def parser() -> argparse.ArgumentParser:
    """Of the flags that are not `serve.py`'s."""
    built = argparse.ArgumentParser(
        prog="python -m mini_engine.batch",
        usage="%(prog)s -i FILE -o FILE [--base-url URL | MODEL and flags of serve.py]",
        description="Answer a file of requests in OpenAI's batch format. Run again, it skips what is answered.",
        allow_abbrev=False,
    )
    add = built.add_argument
    add("-i", "--input-file", type=Path, required=True, metavar="FILE", help="Requests: a JSON object per line.")
    add("-o", "--output-file", type=Path, required=True, metavar="FILE", help="Answers; appended to.")
    own = "Default: one of this command's own, with the flags of serve.py."
    add("--base-url", metavar="URL", help=f"A running server, its key in OPENAI_API_KEY. {own}")
    retried = "Without it: where it is 401, 403, 429, 500 or 502 to 504, or no response came."
    add("--retry-failed", action="store_true", help=f"Ask again where the status is not 200. {retried}")
    requests = f"Requests in flight (default: {MAX_CONCURRENCY})."
    add("--max-concurrency", type=int, default=MAX_CONCURRENCY, metavar="N", help=requests)
    return built


def main(argv: Sequence[str]) -> int:
    """The exit status: 0, 1 when a request failed or the server ended, 2 for unusable files or flags."""
    args, flags = parser().parse_known_args(argv)
    try:
        if args.base_url is not None and flags:
            raise ConfigError(f"{flags[0]}: has no effect with --base-url")
        ids = ids_of(args.input_file)
        with contextlib.closing(AnswerFile(args.output_file, args.retry_failed)) as answers:
            if ids <= answers.done:
                print(f"all {len(ids)} requests have an answer", file=sys.stderr)
            else:
                answer_all(args, flags, answers, ids)
            if answers.failed:
                print(f"{answers.failed} failed; --retry-failed asks all of them again", file=sys.stderr)
                for failure, number in answers.failures.most_common(FAILURES_SHOWN):
                    print(f"    {number} x {failure}", file=sys.stderr)
            return 1 if answers.failed else 0
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    except (ConfigError, ServerError, OSError) as error:
        print(f"mini_engine.batch: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def answer_all(args: argparse.Namespace, flags: Sequence[str], answers: AnswerFile, ids: set[str]) -> None:
    """Send the requests that have no answer, and append the answers. Raises ConfigError, ServerError; OSError: an
    answer cannot be written."""
    if args.base_url is None:
        check_flags(flags)
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key and args.base_url else {}
    seconds: dict[str, float] = collections.defaultdict(float)
    interval = 0.1 if sys.stderr.isatty() else PROGRESS_SECONDS
    root = None if args.base_url is None else root_of(args.base_url)
    with contextlib.closing(ServerHandle(root, flags, headers, args.max_concurrency)) as server:
        # Other servers refuse the field of this one that asks for the time of each stage.
        requests = (request for request in read_requests(args.input_file) if request.custom_id not in answers.done)
        works = (ask(server, request, with_timings=args.base_url is None) for request in requests)
        num_done = len(ids & answers.done)
        with tqdm(total=len(ids), initial=num_done, unit=" requests", mininterval=interval) as bar:
            for answer, timings in server.as_finished(works):
                answers.append(answer)
                for stage in STAGES.keys() & timings.keys():
                    seconds[STAGES[stage]] += timings[stage]
                whole = sum(seconds.values()) or 1.0
                shares = [f"{name} {spent / whole:.0%}" for name, spent in seconds.items()]
                bar.set_postfix_str(", ".join([f"{answers.failed} failed", *shares]), refresh=False)
                bar.update()


async def ask(
    server: ServerHandle, request: BatchRequest, with_timings: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """The answer's line, and the seconds of each stage. Raises ServerError."""
    body, is_chat = request.body, request.url == "/v1/chat/completions"
    adds_timings = with_timings and is_chat and not body.get("return_timings")
    if adds_timings:
        body = body | {"return_timings": True}
    reply = await server.post(request.url, msgspec.json.encode(body))
    return answer_row(request.custom_id, reply), reply.body.pop("metrics", {}) if adds_timings else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
