"""A child process of tests: it does what the index in its spec says, and shakes no hands."""

from __future__ import annotations

import os
import sys
import time

import msgspec

from mini_engine.child import ChildSpec
from mini_engine.confinement import die_with_parent

CHUNK = b"x" * 1000


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=ChildSpec)
    die_with_parent(spec.parent_pid)
    what = spec.index.rpartition(".")[2]  # behind the engine's number, if there is one
    while what == "lines":
        os.write(1, CHUNK + b"\n")
    while what == "no-line":
        os.write(1, CHUNK)
    if what == "fails":
        sys.exit(1)
    if what == "closes":
        os.closerange(1, 3)
    if what == "sleeps":
        os.write(1, b"it sleeps\n")
    if what in ("sleeps", "closes"):
        time.sleep(600)


main()
