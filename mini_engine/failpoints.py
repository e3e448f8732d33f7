"""Fail points: named places where a process can be held, in the manner of etcd's gofail.

A fail point does nothing unless the environment variable MINI_ENGINE_FAILPOINTS names a directory. There the file
`NAME.armed` arms the fail point NAME. The first process that reaches it renames the file to `NAME.held.PID` and blocks
until that file is removed. docs/tutorial.md does that at each, from a shell.
"""

import os
import time

VARIABLE = "MINI_ENGINE_FAILPOINTS"
DIRECTORY = os.environ.get(VARIABLE)
POLL_SECONDS = 0.002


def reach_failpoint(name: str) -> None:
    """Block here while the fail point `name` is armed and this process holds it."""
    if DIRECTORY is None:
        return
    held = f"{DIRECTORY}/{name}.held.{os.getpid()}"
    try:
        os.rename(f"{DIRECTORY}/{name}.armed", held)
    except FileNotFoundError:
        return
    while os.path.exists(held):
        time.sleep(POLL_SECONDS)
