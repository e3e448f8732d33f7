"""The server that is measured: one that runs, or one that is started for the purpose; and what it says of itself."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from mini_engine.bench.client import Target
from mini_engine.bench.report import ROOT, BenchError, say
from mini_engine.cli import settle
from mini_engine.config import ConfigError
from mini_engine.process_setup import die_with_parent

START_SECONDS = 600.0
STOP_SECONDS = 30.0
ANSWER_SECONDS = 30.0
LOG_TAIL_CHARACTERS = 4000
ENDPOINTS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions", "vllm": "/v1/completions"}


def server_flags(name: str, text: str) -> list[str]:
    """The flags of serve.py in a text.

    Raises:
        ConfigError: serve.py would not take them; `name` is the flag that they were given by.
    """
    try:
        flags = shlex.split(text)
        settle(flags, os.environ)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    return flags


@contextlib.contextmanager
def open_target(args: argparse.Namespace, launch: Sequence[str] | None) -> Iterator[Target]:
    """The server at the flags' address; or one with the flags `launch`, which is stopped when the block ends.

    Raises:
        BenchError: it does not answer, or did not start.
    """
    if launch is not None:
        with launched(launch) as (root, _):
            yield _probe(args, root)
        return
    root = (args.base_url or f"http://{args.host or '127.0.0.1'}:{args.port or 8000}").rstrip("/")
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            target = _probe(args, root)
            break
        except urllib.error.URLError as error:
            if time.monotonic() >= deadline:
                raise BenchError(
                    f"no server answers at {root} ({error.reason}): start one with `python serve.py`, or let bench.py "
                    'start it with --launch ""'
                ) from None
        time.sleep(0.2)
    yield target


def _probe(args: argparse.Namespace, root: str) -> Target:
    """Ask a server for its model, and whether its interface has `return_timings`."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    headers |= dict(args.header)
    timings = False
    with contextlib.suppress(urllib.error.HTTPError):  # not every server describes its interface
        timings = args.backend == "openai-chat" and b'"return_timings"' in _get(f"{root}/openapi.json", headers)
    model = args.served_model_name or args.model or json.loads(_get(f"{root}/v1/models", headers))["data"][0]["id"]
    return Target(root + (args.endpoint or ENDPOINTS[args.backend]), model, timings, headers, not args.disable_tqdm)


def _get(url: str, headers: dict[str, str]) -> bytes:
    """By no proxy, as the requests that are measured."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=ANSWER_SECONDS) as response:
        return bytes(response.read())


@contextlib.contextmanager
def launched(flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A server of this project on a free port of the loopback interface; yields its URL without a slash at the end, and
    its process id. It is killed if this process dies. Use it on the main thread, whose end is what the kernel watches.

    Raises:
        BenchError: it did not start; with the end of its log.
    """
    address = ["--host", "127.0.0.1", "--port", "0"]
    with tempfile.NamedTemporaryFile() as log:  # a pipe would fill up
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "serve.py"), *address, *flags, "--log-level", "info"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the benchmark, which stops the server in its turn
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        try:
            yield _wait_for_url(process, Path(log.name)), process.pid
        finally:
            if process.poll() is not None:
                text = Path(log.name).read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
                say(f"the server exited with status {process.returncode}:\n{text}")
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                say(f"the server did not stop within {STOP_SECONDS:.0f} s and is killed")
                process.kill()
                process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(r" at (http://\S+)/v1 ", log.read_text(errors="replace")):
            return match[1]
        time.sleep(0.05)
    raise BenchError(f"the server was not ready within {START_SECONDS:.0f} s; if it exited, its log is above")
