"""The engine's overhead per decode step: the time of a step beyond the model's own.

The bundled model, or that of --launch, decodes one batch; one torch thread. The three take turns, and the fastest of
--repeats counts, since whatever else the machine does only adds:
    step      wall time of a step in a running server, which gets one chat request with `n` answers, so that all of its
              sequences decode together: the engine's own `generation` time by the tokens of an answer but the first.
              Meanwhile the API server is stopped (SIGSTOP): on a host with few cores its work on these tokens would
              take more from the worker than all that is measured here
    execute   CPU time of the worker's part of such a step (`ModelRunner`), by one thread of this process, without any
              message, while the server is idle
    forward   the model's part of that: embedding, layers, attention over the paged cache, logits
The engine's share is step - forward. Execute - forward is the worker's part of it: the layout of the batch, sampling,
tokens to Python. The rest is messages, scheduling and waking up, in the engine core and between it and the worker.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cli import Report, say, table
from benchmarks.runner import decode, make_runner, plain_requests, take
from benchmarks.server import fetch, launched, server_flags
from mini_engine.launch.cli import parse

MODEL_PARTS = ("embed", "forward", "logits")
PROMPT_TOKENS = 32  # about those of the server's prompt
WARM_UP_STEPS = 10
SUBMIT_SECONDS = 0.03  # after which the engine has the request
LONGEST_STEP_SECONDS = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--launch", default="", metavar="FLAGS", help="Flags of serve.py.")
    parser.add_argument("--batch", type=int, default=32, help="Number of sequences (default: 32).")
    parser.add_argument("--steps", type=int, default=100, help="Steps per measurement (default: 100).")
    parser.add_argument("--repeats", type=int, default=10, help="Measurements; the fastest counts (default: 10).")


def run(args: argparse.Namespace) -> Report:
    """Start the server, measure in turn, print the table."""
    flags = ["-dp", "1", *server_flags("--launch", args.launch)]
    longest = PROMPT_TOKENS + WARM_UP_STEPS + args.steps
    runner, model = make_runner(parse(flags), [(args.batch, longest)])
    forward = [0.0]
    for part in MODEL_PARTS:
        setattr(model, part, _timed(getattr(model, part), forward))
    seconds: dict[str, list[float]] = {"forward": [], "execute": [], "step": []}
    with launched([*flags, "--max-num-seqs", str(args.batch)]) as (root, pid):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        api_server = next(int(child) for child in children if b"api 0" in Path(f"/proc/{child}/cmdline").read_bytes())
        for repeat in range(args.repeats):
            say(f"repeat {repeat + 1} of {args.repeats}")
            with contextlib.closing(decode(runner, plain_requests(args.batch, PROMPT_TOKENS))) as steps:
                take(steps, WARM_UP_STEPS)
                forward[0], begun = 0.0, time.thread_time()
                take(steps, args.steps)
                seconds["execute"].append((time.thread_time() - begun) / args.steps)
                seconds["forward"].append(forward[0] / args.steps)
            seconds["step"].append(_step_seconds(root, api_server, args))
    least = {name: 1000 * min(values) for name, values in seconds.items()}
    share = 1 - least["forward"] / least["step"]
    rows = [
        [name, least[name], 1000 * statistics.median(values), least[name] / least["forward"]]
        for name, values in seconds.items()
    ]
    print(f"A decode step of {args.batch} sequences, ms; {args.repeats} times {args.steps} steps")
    print(table(["", "fastest", "median", "/ forward"], rows))
    print(f"Engine overhead per step: {share:.1%}")
    results: dict[str, Any] = {f"{name}_ms": round(value, 4) for name, value in least.items()}
    return Report(results | {"batch": args.batch, "engine_share": round(share, 4)})


def _step_seconds(root: str, api_server: int, args: argparse.Namespace) -> float:
    """Of a step in the server at `root`."""
    body = {
        "messages": [{"role": "user", "content": "Say a word."}], "n": args.batch, "max_tokens": args.steps + 1,
        "ignore_eos": True, "seed": 0, "temperature": 0, "return_timings": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        response = pool.submit(fetch, f"{root}/v1/chat/completions", headers, json.dumps(body).encode())
        time.sleep(SUBMIT_SECONDS)
        os.kill(api_server, signal.SIGSTOP)
        try:
            time.sleep(args.steps * LONGEST_STEP_SECONDS)
        finally:
            os.kill(api_server, signal.SIGCONT)
        return float(json.loads(response.result())["metrics"]["generation"]) / args.steps


def _timed(function: Callable[..., Any], total: list[float]) -> Callable[..., Any]:
    """`function`, which adds the CPU seconds that this thread spends in it to `total[0]`."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time()
        result = function(*args, **kwargs)
        total[0] += time.thread_time() - begun
        return result

    return timed
