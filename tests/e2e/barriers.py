"""The test's end of `tests/e2e/inside/sitecustomize.py`: hold a process of the server at a place, and look into it. And
others to wait for what happens in them."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

INSIDE = Path(__file__).parent / "inside"
FAIL_POINTS = ("decoding",)  # of mini_engine/failpoints.py: held is a decoder of process `pid`


def eventually(check: Callable[[], T], seconds: float = 60) -> T:
    """The result of `check` once it raises no AssertionError any more; the last one when time is up."""
    deadline = time.monotonic() + seconds
    pause = 0.01
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let the process stand still; in the end it goes on, unless it is dead."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Inside:
    """`with Inside() as inside, RunningServer(environ=inside.environ) as server:`"""

    def __enter__(self) -> Inside:
        self._temporary = tempfile.TemporaryDirectory(prefix="me-in-")  # short: sockets are bound in it
        self.directory = self._temporary.name
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
        self.environ = {
            "PYTHONPATH": path,
            "MINI_ENGINE_TEST_INSIDE": self.directory,
            "MINI_ENGINE_FAILPOINTS": self.directory,
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    @contextlib.contextmanager
    def barrier(self, name: str) -> Iterator[Barrier]:
        """Hold the next passage, in whichever process it happens, while the block runs."""
        barrier = Barrier(Path(self.directory), name)
        barrier.armed.touch()
        try:
            yield barrier
        finally:
            barrier.let_go()

    def figures(self, pid: int) -> dict[str, dict[str, int]]:
        """What a process holds for requests, and what it keeps for those to come.

        Raises:
            AssertionError: it cannot tell: it is dead, or has only just begun.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            try:
                connection.connect(f"{self.directory}/{pid}.figures")
                with connection.makefile() as answer:
                    return json.loads(answer.read())
            except (OSError, ValueError) as error:
                raise AssertionError(f"process {pid} does not tell what it holds: {error}") from error


class Barrier:
    """One arming of a barrier."""

    def __init__(self, directory: Path, name: str):
        self.armed = directory / f"{name}.armed"
        self._held = str(directory / f"{name}.held.*")

    def wait_until_held(self, seconds: float = 240) -> dict[str, Any]:
        """What the process that is held tells: its `pid`, and more. Raises AssertionError when nobody comes."""
        return eventually(self._told, seconds)

    def let_go(self) -> None:
        """Hold nobody any more, and whoever is held goes on."""
        self.armed.unlink(missing_ok=True)
        for path in glob.glob(self._held):
            os.unlink(path)

    def _told(self) -> dict[str, Any]:
        paths = glob.glob(self._held)
        assert paths, f"nobody has come to {self.armed.stem}"
        if self.armed.stem in FAIL_POINTS:
            held = int(paths[0].rpartition(".")[2])
            return {"pid": int(Path(f"/proc/{held}/stat").read_text().rpartition(") ")[2].split()[1]), "decoder": held}
        text = Path(paths[0]).read_text()
        assert text, "it is still writing"
        return json.loads(text)
