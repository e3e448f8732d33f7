"""A server as a user starts it: `python serve.py`, over HTTP, with nothing of it imported."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from openai import OpenAI

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 240  # on a machine with more at work
FIGURES_SECONDS = 1.0  # after which `/metrics` shows what is known of an engine that has not answered, see `figures`

# The types of the media cache, and the flags for each.
CACHES = {
    "off": ["--mm-processor-cache-gb", "0"],
    "lru": ["--mm-processor-cache-type", "lru"],
    "shm": ["--mm-processor-cache-type", "shm"],
}


class RunningServer:
    """`with RunningServer("-tp", "2") as server:` The log goes to a file, so that no full pipe can stop the server.

    With `own_dev_shm` the server's processes see an empty /dev/shm that nobody else writes to, if the system allows it.
    """

    def __init__(self, *flags: str, environ: dict[str, str] | None = None, own_dev_shm: bool = False):
        launcher = ["tests/e2e/own_dev_shm.py"] if own_dev_shm else []
        self.command = [sys.executable, *launcher, "serve.py", "--host", "127.0.0.1", "--port", "0", *flags]
        self.environ = environment(flags, environ)

    def __enter__(self) -> RunningServer:
        self.temporary = tempfile.TemporaryDirectory(prefix="me-test-")
        self.log_path = Path(self.temporary.name) / "log"
        self.tmpdir = Path(self.temporary.name) / "tmp"
        self.tmpdir.mkdir()
        self.shm_before = set(os.listdir("/dev/shm"))
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                env={**self.environ, "TMPDIR": str(self.tmpdir)}, start_new_session=True,
            )  # fmt: skip
        self.url = self._wait_for_url()
        self.client = self._connect()
        self.model = self.client.models.list().data[0].id
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()
        self.temporary.cleanup()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if match := re.search(r" at (http\S*://\S+/v1) ", self.log):
                return match[1]
            if self.process.poll() is not None:
                raise AssertionError(f"serve.py ended with {self.process.returncode}:\n{self.log}")
            time.sleep(0.05)
        self.stop()
        raise AssertionError(f"serve.py was not ready in time:\n{self.log}")

    def _connect(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=120)

    # --- requests

    def get(self, path: str) -> str:
        """The body of a GET on the server's root, such as `/metrics`."""
        with urllib.request.urlopen(self.url.removesuffix("/v1") + path, timeout=120) as response:
            return response.read().decode()

    def metrics(self) -> dict[str, float]:
        """`/metrics` by sample name with labels, such as `mini_engine:ipc_messages_total{transport="torch_shm"}`."""
        samples = {}
        for line in figures(lambda: self.get("/metrics")).splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def total(self, name: str) -> float:
        """A metric summed over its labels; `name` without the prefix."""
        samples = self.metrics()
        found = [value for key, value in samples.items() if key.partition("{")[0] == f"mini_engine:{name}"]
        assert found, f"/metrics has no {name}"
        return sum(found)

    def ask(self, question: str, urls: list[tuple[str, str]], **more: object) -> str:
        """The answer to one question about media given as (part type, url)."""
        reply = self.client.chat.completions.create(
            model=self.model, messages=[message(question, urls)], temperature=0, **more
        )
        return reply.choices[0].message.content

    # --- processes

    def pids(self) -> dict[str, int]:
        """The server's processes by title, such as `mini-engine: worker 0.1`; the supervisor is `supervisor`.

        Without the decoders, of which there are as many as the load needs."""
        found = {"supervisor": self.process.pid}
        for pid in descendants(self.process.pid):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            if title.startswith(("mini-engine: api", "mini-engine: core", "mini-engine: worker")):
                found[title if title not in found else f"{title} #{pid}"] = pid
        return found

    def assert_dev_shm_never_written(self) -> None:
        """No name was ever made in the server's own /dev/shm. Where it has to share everybody's: it left none there."""
        theirs = os.stat(f"/proc/{self.process.pid}/root/dev/shm")
        if theirs.st_dev != os.stat("/dev/shm").st_dev:
            assert theirs.st_mtime_ns == 0, os.listdir(f"/proc/{self.process.pid}/root/dev/shm")
        else:
            names = set(os.listdir("/dev/shm")) - self.shm_before
            assert not any(not in_use(name) for name in names), names

    def stop(self, number: int = signal.SIGINT, seconds: float = 60) -> int:
        """Send a signal to the supervisor and wait; asserts that nothing is left. Returns the exit status."""
        if self.process.poll() is None:
            family = descendants(self.process.pid)
            self.process.send_signal(number)
            self.process.wait(seconds)
            self.assert_nothing_left(family)
        return self.process.returncode

    def assert_nothing_left(self, family: list[int], seconds: float = 60) -> None:
        """No process of `family`, no runtime directory and nothing in /dev/shm is left within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            processes = [pid for pid in family if alive(pid)]
            files = os.listdir(self.tmpdir)
            names = {name for name in set(os.listdir("/dev/shm")) - self.shm_before if not in_use(name)}
            if not (processes or files or names):
                return
            assert time.monotonic() < deadline, f"left behind: {processes} {files} {names}\n{self.log}"
            time.sleep(0.05)


def environment(flags: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of `serve.py` with these flags: this process's, with `environ` over it, and where it has to serve."""
    import torch  # which takes a second, and not all who import this file start a server

    whole = {**os.environ, **(environ or {})}
    return whole | where_to_serve(flags, whole, torch.cuda.device_count())


def where_to_serve(flags: Sequence[str], environ: Mapping[str, str], devices: int) -> dict[str, str]:
    """What to add to the environment where there are CUDA devices, but fewer than workers: `--device auto` would refuse
    to start. Nothing where somebody says on what the workers run, or how they share devices."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (("-tp", "--tensor-parallel-size"), ("-dp", "--data-parallel-size")):
        parser.add_argument(*names, type=int, default=1)
    for name in ("device", "distributed-backend"):
        parser.add_argument(f"--{name}", default=environ.get(f"MINI_ENGINE_{name.upper().replace('-', '_')}"))
    given, _ = parser.parse_known_args(flags)
    workers = given.tensor_parallel_size * given.data_parallel_size
    if given.device or given.distributed_backend or not 0 < devices < workers:
        return {}
    return {"MINI_ENGINE_DEVICE": "cpu"}


def figures(ask: Callable[[], str]) -> str:
    """What `ask` has of `/metrics`, once that came too soon for an engine to have been given up that does not tell how
    it is: then it is all of this moment.

    Raises:
        AssertionError: it never does.
    """
    deadline = time.monotonic() + START_SECONDS
    while (begun := time.monotonic()) < deadline:
        text = ask()
        if time.monotonic() - begun < 0.9 * FIGURES_SECONDS:
            return text
    raise AssertionError("/metrics always takes as long as if an engine did not answer")


def message(question: str, urls: list[tuple[str, str]]) -> dict:
    """A user message: the media in order, then the question."""
    parts = [{"type": kind, kind: {"url": url}} for kind, url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def in_use(name: str) -> bool:
    """Whether a living process maps this name of /dev/shm: then it is another program's."""
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and f"/dev/shm/{name}" in Path(f"/proc/{entry}/maps").read_text():
                return True
        except OSError:
            continue
    return False


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found, line = [], [pid]
    while line:
        line += children.get(line[0], [])
        found.append(line.pop(0))
    return found[1:]
