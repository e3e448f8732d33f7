"""A child process of tests: it does what the index in its spec says, and shakes no hands."""

from __future__ import annotations

import sys
import time

import msgspec

from mini_engine.launch.child import ChildSpec
from mini_engine.launch.process_setup import die_with_parent


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=ChildSpec)
    die_with_parent(spec.parent_pid)
    what = spec.index.rpartition(".")[2]  # behind the engine's number, if there is one
    if what == "fails":
        sys.exit(1)
    if what == "sleeps":
        time.sleep(600)
    while what == "spins":
        pass


main()
