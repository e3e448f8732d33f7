"""A running server with little room for files: it serves, or says why not."""

import os
import signal
import subprocess
import tempfile

import pytest

from tests.support.client import ClientRequest, ask_video
from tests.support.processes import eventually
from tests.support.running_server import START_SECONDS, RunningServer


def in_scarcity(size: str, *command: str, limits: str = "") -> list[str]:
    """The command, where TMPDIR has so much room, and /dev/shm is read-only."""
    mounts = f'mount -t tmpfs -o size={size} scarce "$TMPDIR"; mount -t tmpfs -o ro none /dev/shm'
    return ["unshare", "-m", "sh", "-ec", f'{mounts}; {limits} exec "$@"', "sh", *command]


def may_mount() -> bool:
    with tempfile.TemporaryDirectory() as tried:
        environ = {**os.environ, "TMPDIR": tried}
        return subprocess.run(in_scarcity("2M", "true"), capture_output=True, env=environ).returncode == 0


pytestmark = pytest.mark.skipif(not may_mount(), reason="this user may not mount a file system")


def test_a_replaced_api_server_needs_no_room_in_tmpdir():
    """And no process ever needs /dev/shm, or more than 256 descriptors. What the dead server counted stays. The
    model is quantised, and answers as well."""
    before, question = ask_video(300), ask_video(301)
    server = RunningServer("-tp", "2", "--api-server-count", "2", "--quantization", "int8")
    server.command = in_scarcity("2M", *server.command, limits="ulimit -n 256;")
    with server:
        assert ClientRequest(server, "api 0", before).answer() == before.answer
        answered = server.total("request_success_total")
        room = f"/proc/{server.process.pid}/root{server.tmpdir}/all"
        with pytest.raises(OSError, match="No space"), open(room, "wb") as file:
            while True:
                file.write(bytes(1 << 12))
                file.flush()
        os.kill(server.pids()["api 0"], signal.SIGKILL)
        eventually(lambda: "replacement ready" in server.log, START_SECONDS)
        assert ClientRequest(server, "api 0", question).answer() == question.answer
        assert server.total("request_success_total") == answered + 1


def test_a_tmpdir_without_room_for_metrics_is_refused_in_one_line():
    server = RunningServer()
    server.command = in_scarcity("100k", *server.command)
    with pytest.raises(RuntimeError, match="ended with 1:") as ended, server:
        pass
    line = str(ended.value).splitlines()[-1]  # after those on what is loaded
    assert "start failed: " in line and "no room in TMPDIR for the metrics" in line and "set TMPDIR" in line
