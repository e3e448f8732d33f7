"""A server that is hurt and recovers: its processes by role, when it is whole again, and that nothing is left over."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from tests.e2e.asked import Asked, ask_small
from tests.e2e.barriers import Inside, eventually
from tests.e2e.held import assert_nothing_held, descriptors
from tests.e2e.pinned import Asking, call
from tests.e2e.running_server import RunningServer

API_SERVERS = 2
RECOVERY_SECONDS = 240  # a start, on a machine with more at work
SILENCE_SECONDS = 8  # --collective-timeout, where processes stand still
NO_SILENCE = ("--collective-timeout", "120")  # where they die: no time-out tells of that in time
STARTUP_SECONDS = 120  # --startup-timeout
TOLD_WITHIN_SECONDS = 5  # of a death: at once, on a machine with more at work

FLAGS = [
    "--api-server-count", str(API_SERVERS), "--restart-engine", "1000", "--max-num-batched-tokens", "128",
    "--health-timeout", "2", "--collective-timeout", str(SILENCE_SECONDS), "--startup-timeout", str(STARTUP_SECONDS),
]  # fmt: skip


class Ground:
    """A running server with two API servers and `ranks` workers whose engine starts anew when it dies."""

    def __init__(self, ranks: int, inside: Inside, server: RunningServer):
        self.ranks = ranks
        self.inside = inside
        self.server = server
        self.titles = {f"mini-engine: {name}" for name in ("api 0", "api 1", "core 0")} | self.workers
        server.client.close()  # its connection would count
        self.assert_whole()
        self.supervisor_descriptors = descriptors(server.process.pid)

    @property
    def workers(self) -> set[str]:
        return {f"mini-engine: worker 0.{rank}" for rank in range(self.ranks)}

    def pid(self, role: str) -> int:
        """Of `api 0`, `core 0`, `worker 0.1` or `supervisor`."""
        return self.server.pids()[role if role == "supervisor" else f"mini-engine: {role}"]

    def hurt(self, role: str, number: int) -> float:
        """Send a signal; returns when, or a moment before."""
        pid, now = self.pid(role), time.monotonic()
        os.kill(pid, number)
        return now

    def wait_until_whole(self, without: set[int]) -> None:
        """Until each process is there once, none of them one of `without`, and every API server says it is well."""

        def check() -> None:
            assert self.server.process.poll() is None, self.server.log
            theirs = {title: pid for title, pid in self.server.pids().items() if title.startswith("mini-engine")}
            assert set(theirs) == self.titles, set(theirs) ^ self.titles
            assert not without & set(theirs.values())
            for slot in range(API_SERVERS):
                call(self.server, f"mini-engine: api {slot}", "GET", "/health")

        eventually(check, RECOVERY_SECONDS)

    def assert_whole(self) -> None:
        """Every API server answers right, and then nothing is held anywhere."""
        for slot in range(API_SERVERS):
            one = ask_small(7000 + slot)
            assert Asking(self.server, f"mini-engine: api {slot}", one).answer() == one.answer
        eventually(lambda: assert_nothing_held(self.server, self.inside, "mini-engine: api 0", self.titles))

    def assert_nothing_left_over(self) -> None:
        """The supervisor has as many descriptors as before, and one directory of sockets; /dev/shm was never used."""

        def check() -> None:
            assert descriptors(self.server.process.pid) == self.supervisor_descriptors

        eventually(check)
        (runtime,) = self.server.tmpdir.iterdir()
        assert len([path for path in runtime.iterdir() if path.name.isdigit()]) == 1
        self.server.assert_dev_shm_never_written()


@contextlib.contextmanager
def a_ground(ranks: int, *flags: str) -> Iterator[Ground]:
    with (
        Inside() as inside,
        RunningServer(*FLAGS, "-tp", str(ranks), *flags, environ=inside.environ, own_dev_shm=True) as server,
    ):
        yield Ground(ranks, inside, server)


def questions(first: int, count: int) -> list[Asked]:
    """So many small videos that no other test asks about."""
    return [ask_small(first + number) for number in range(count)]
