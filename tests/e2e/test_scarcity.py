"""A running server with few descriptors, or little room for files: it serves, or says why not."""

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

import pytest

from tests.support.client import ClientRequest, Question, answers_of, ask_video
from tests.support.processes import eventually
from tests.support.running_server import START_SECONDS, RunningServer


def own_mounts(size: str) -> str:
    """A script after which TMPDIR has so much room, and /dev/shm is read-only."""
    mounts = f'mount -t tmpfs -o size={size} scarce "$TMPDIR"; mount -t tmpfs -o ro none /dev/shm'
    return f"mount --make-rprivate /; {mounts}; "


def may_mount() -> bool:
    with tempfile.TemporaryDirectory() as tried:
        script = ["unshare", "-m", "sh", "-ec", own_mounts("2M")]
        return subprocess.run(script, capture_output=True, env={**os.environ, "TMPDIR": tried}).returncode == 0


MAY_MOUNT = may_mount()
needs_mounts = pytest.mark.skipif(not MAY_MOUNT, reason="this user may not mount a file system")


@pytest.fixture(scope="module")
def scarce() -> Iterator[RunningServer]:
    """A server with 256 descriptors in each process; and, with mounts, without /dev/shm. Its model is quantised, and
    answers as well."""
    before = own_mounts("2M") * MAY_MOUNT + "prlimit --nofile=256 --pid $PPID"
    with RunningServer("-tp", "2", "--api-server-count", "2", "--quantization", "int8", before=before) as server:
        server.client.close()  # its connection would count
        yield server


@pytest.fixture(scope="module")
def video_questions() -> list[Question]:
    return [ask_video(seed) for seed in range(300, 328)]


def assert_answered(server: RunningServer, questions: Sequence[Question], at_once: int = 4) -> None:
    assert answers_of(server, questions, at_once) == [question.answer for question in questions]


def test_256_descriptors_in_each_process_are_enough(scarce, video_questions):
    for _ in range(2):
        assert_answered(scarce, video_questions, 28)
    lines = len(scarce.log.splitlines())
    with contextlib.ExitStack() as clients:
        for _ in range(600):  # more than both API servers together have descriptors, all of them silent
            clients.enter_context(socket.create_connection(scarce.address, timeout=120))
    eventually(lambda: not scarce.has_clients())
    assert_answered(scarce, video_questions[:1])
    api_servers = [scarce.pids()[name] for name in ("api 0", "api 1")]
    for pid in api_servers:
        used = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, 256))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(scarce.address)) for _ in range(40)]
        # Without a descriptor a connection is closed at once.
        eventually(lambda: len(select.select(clients, [], [], 0)[0]) >= 30)
    for pid in api_servers:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, 256))
    assert_answered(scarce, video_questions[:1])
    assert len(scarce.log.splitlines()) - lines < 10
    scarce.assert_at_rest()


@needs_mounts
def test_a_replaced_api_server_needs_no_room_in_tmpdir(scarce, video_questions):
    """And no process ever needs /dev/shm. What the dead server counted stays."""
    assert_answered(scarce, video_questions[:1])
    answered = scarce.total("request_success_total")
    with (
        pytest.raises(OSError, match="No space"),
        open(f"/proc/{scarce.process.pid}/root{scarce.tmpdir}/all", "wb") as all_,
    ):
        while True:
            all_.write(bytes(1 << 12))
            all_.flush()
    os.kill(scarce.pids()["api 0"], signal.SIGKILL)
    eventually(lambda: "replacement ready" in scarce.log, START_SECONDS)
    question = video_questions[1]
    assert ClientRequest(scarce, "api 0", question).answer() == question.answer
    assert scarce.total("request_success_total") == answered + 1


@needs_mounts
def test_a_tmpdir_without_room_for_metrics_is_refused_in_one_line():
    with pytest.raises(RuntimeError, match="ended with 1:") as ended, RunningServer(before=own_mounts("100k")):
        pass
    line = str(ended.value).splitlines()[-1]  # after those on what is loaded
    assert "start failed: " in line and "no room in TMPDIR for the metrics" in line and "set TMPDIR" in line
