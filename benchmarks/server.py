"""The server that is measured: one that runs, or one that is started for the purpose; and what it says of itself."""

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cli import BenchError, say
from benchmarks.client import Target
from mini_engine.config import ConfigError
from mini_engine.launch.cli import settle
from mini_engine.launch.process_setup import module_paths

LOG_TAIL_CHARACTERS = 4000
SAMPLE_SECONDS = 1.0
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
def open_target(args: argparse.Namespace) -> Iterator[Target]:
    """The server at the flags' address; or a new one with the flags of --launch, which is stopped when the block ends.

    Raises:
        BenchError: it does not answer, or did not start.
    """
    with contextlib.ExitStack() as stack:
        url, pid = args.base_url or f"http://{args.host or '127.0.0.1'}:{args.port or 8000}", None
        root = url.rstrip("/").removesuffix("/v1")
        if args.launch is not None:
            root, pid = stack.enter_context(launched(server_flags("--launch", args.launch)))
        yield _probe_until_ready(args, root, pid)


def _probe_until_ready(args: argparse.Namespace, root: str, pid: int | None) -> Target:
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            return _probe(args, root, pid)
        except BenchError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(1)


def _probe(args: argparse.Namespace, root: str, pid: int | None) -> Target:
    """Ask a server for its model, and whether its interface has `return_timings`."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    headers |= dict(args.header)
    timings = False
    try:
        with contextlib.suppress(urllib.error.HTTPError):  # not every server describes its interface
            timings = args.backend == "openai-chat" and b'"return_timings"' in fetch(f"{root}/openapi.json", headers)
        model = args.served_model_name or args.model
        model = model or json.loads(fetch(f"{root}/v1/models", headers))["data"][0]["id"]
    except urllib.error.HTTPError as error:
        raise BenchError(f"{error.url}: status {error.code}; a server with an API key needs OPENAI_API_KEY") from None
    except urllib.error.URLError as error:
        raise BenchError(
            f"no server answers at {root} ({error.reason}): start one with `python serve.py`, or let bench.py start it "
            'with --launch ""'
        ) from None
    return Target(root + (args.endpoint or ENDPOINTS[args.backend]), model, timings, headers, args.disable_tqdm, pid)


def fetch(url: str, headers: dict[str, str], body: bytes | None = None) -> bytes:
    """By no proxy, as the requests that are measured. Raises URLError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, body, headers)) as response:
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
            [sys.executable, "-m", "mini_engine.launch", str(os.getpid()), *address, *flags, "--log-level", "info"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the benchmark, which stops the server in its turn
            env={**os.environ, **module_paths()},
        )
        try:
            yield _wait_for_url(process, Path(log.name)), process.pid
        finally:
            if process.poll() is not None:
                text = Path(log.name).read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
                say(f"the server exited with status {process.returncode}:\n{text}")
            process.send_signal(signal.SIGINT)
            process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if match := re.search(r" at (http://\S+)/v1 ", log.read_text(errors="replace")):
            return match[1]
        time.sleep(0.05)
    raise BenchError("the server did not start; its log is above")


def memory_mb(pid: int) -> float:
    """What a process and its descendants have in memory, in MB of 2**20 bytes. Shared pages count once: it is the sum
    of proportional set sizes. A process that exits meanwhile counts as 0."""
    found = 0.0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found += int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0]) / 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += sum(map(memory_mb, map(int, (task / "children").read_text().split())))
    return found


@contextlib.contextmanager
def peak_memory(pid: int | None, found: dict[str, float]) -> Iterator[None]:
    """Adds, if there is a `pid`, `peak_memory_mb`: the highest in the block, every SAMPLE_SECONDS and at its end."""
    ended = threading.Event()

    def sample() -> None:
        is_last = False
        while pid and not is_last:
            is_last = ended.wait(SAMPLE_SECONDS)
            found["peak_memory_mb"] = max(found.get("peak_memory_mb", 0.0), memory_mb(pid))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        sampling = pool.submit(sample)
        try:
            yield
        finally:
            ended.set()
    sampling.result()  # raises its error
