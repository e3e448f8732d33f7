"""What a program makes of the log of its own server, which is another process here."""

import asyncio
import subprocess
import sys

from mini_engine.batch.server_handle import forward_log

DOWNLOAD = r"""
import sys
sys.stderr.write("".join(f"\rmodel.safetensors: {number:9}|" for number in range(100_000)))
sys.stderr.write("\nserve.py: start failed: no space is left\n")
sys.exit(2)
"""


async def test_a_progress_bar_of_any_length_does_not_end_the_log() -> None:
    ended = asyncio.get_running_loop().create_future()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", DOWNLOAD, stderr=subprocess.PIPE)
    await forward_log(process, ended)
    assert str(ended.result()) == "no space is left"
