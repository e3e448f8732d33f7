"""A child process of tests: it exits, sleeps, spins or stops at a breakpoint, by its index, without a handshake."""

from __future__ import annotations

import sys
import time

import msgspec

from mini_engine.launch.child import ChildSpec
from mini_engine.launch.process_setup import die_with_parent


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=ChildSpec)
    die_with_parent(spec.parent_pid)
    behaviour = spec.index.rpartition(".")[2]  # behind the engine's number, if there is one
    if behaviour == "fails":
        sys.exit(1)
    if behaviour == "sleeps":
        time.sleep(600)
    if behaviour == "breaks":
        breakpoint()
    while behaviour == "spins":
        pass


main()
