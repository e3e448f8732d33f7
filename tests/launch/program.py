"""What child processes of tests do in place of a role: exit, sleep, spin or read, by their index."""

import os
import sys
import time

from mini_engine.launch.child import ChildSpec


def run_role(spec: ChildSpec) -> None:
    behaviour = spec.index.rpartition(".")[2]  # behind the engine's number, if there is one
    if behaviour == "fails":
        sys.exit(1)
    if behaviour == "sleeps":
        time.sleep(600)
    if behaviour == "reads":
        sys.exit(int(os.read(0, 10)))
    while behaviour == "spins":
        pass
