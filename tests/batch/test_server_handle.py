"""What a program makes of the log of its own server, which is another process here."""

import asyncio
import subprocess
import sys

import pytest

from mini_engine.batch.server_handle import forward_log


@pytest.mark.parametrize(
    ("status", "says"),
    [(2, "no space is left"), (1, "its log:\nmodel.safetensors:     99999|\nserve.py: start failed: no space is left")],
)
async def test_a_progress_bar_of_any_length_does_not_end_the_log(status: int, says: str) -> None:
    ended = asyncio.get_running_loop().create_future()
    download = (
        r"import sys; sys.stderr.write(''.join(f'\rmodel.safetensors: {number:9}|' for number in range(100_000)))"
    )
    download += r"; sys.stderr.write('\nserve.py: start failed: no space is left\n'); sys.exit(int(sys.argv[1]))"
    command = sys.executable, "-c", download, str(status)
    await forward_log(await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE), ended)
    assert str(ended.result()).endswith(says)
