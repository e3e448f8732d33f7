"""Fail points: named places where a process can be held, in the manner of etcd's gofail.

A fail point does nothing unless the environment variable MINI_ENGINE_FAILPOINTS names a directory. There the file
`NAME.armed` arms the fail point NAME. The first process that reaches it renames the file to `NAME.held.PID` and blocks
until that file is removed.

From a shell with the same variable: `python -m mini_engine.failpoints hold NAME` arms one, and returns when it holds a
process; `release NAME` lets that go on, or disarms the fail point; `--help` lists the names.
"""

import os
import time

VARIABLE = "MINI_ENGINE_FAILPOINTS"
DIRECTORY = os.environ.get(VARIABLE)
POLL_SECONDS = 0.002
FAILPOINTS = {
    "resolving-model": "supervisor, before it looks for the model",
    "binding-sockets": "supervisor, before it binds the port",
    "creating-processes": "supervisor, before it starts a process",
    "restarting-engines": "supervisor, after the death of an engine",
    "starting-child": "any child, before its imports",
    "loading-api": "API server, before it loads processor and tokenizer",
    "listening": "API server, before it accepts connections",
    "decoding": "decoder, after a frame of a video",
    "processing": "API server's thread, before the processor turns frames into patches",
    "writing": "API server's thread, before it writes a tensor to shared memory",
    "loading-core": "engine core, when its workers are ready",
    "accepting": "engine core, before it registers a request",
    "loading-worker": "worker, before it loads the weights",
    "warming-up": "worker, before its first step",
    "receiving": "worker's receiver thread, before it reads a tensor",
    "encoding": "worker, before the first slice of a media item is encoded",
    "prefilling": "worker, in the middle of a prompt that takes several steps",
}


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


def main() -> None:
    """Arm a fail point and wait until it holds a process, or release that; by the command line."""
    import argparse  # what follows is for this command alone, not for every process
    from pathlib import Path

    parser = argparse.ArgumentParser(
        prog="python -m mini_engine.failpoints",
        description="Hold the next process that comes to a place, or release it.",
        epilog="\n".join(f"{name:20}{place}" for name, place in FAILPOINTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["hold", "release"])
    parser.add_argument("name", choices=FAILPOINTS, metavar="NAME")
    arguments = parser.parse_args()
    directory, name = Path(DIRECTORY or ""), arguments.name
    if DIRECTORY is None or not directory.is_dir():
        parser.error(f"{VARIABLE} is not the directory that the server was started with")
    if arguments.action == "release":
        for path in directory.glob(f"{name}.*"):
            path.unlink()
        return
    armed = directory / f"{name}.armed"
    armed.touch()
    while armed.exists():
        time.sleep(POLL_SECONDS)
    for path in directory.glob(f"{name}.held.*"):
        pid = path.suffix[1:]
        title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        print(f"{name} holds process {pid}: {title}")


if __name__ == "__main__":
    main()
