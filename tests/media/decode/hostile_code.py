"""A decoder that a file has taken over: the module that a decoder process runs, with attacks in the place of Pillow.

An image or video is JSON, a `Target`. The error of its job is JSON as well: by the name of each attack, how it failed.
"""

import errno
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from mini_engine.media.decode import decoder, image, sandbox, video
from mini_engine.media.decode.sandbox import call_libc
from mini_engine.media.media_errors import MediaError

CLONE3, X32 = 435, 0x40000000
PR_SET_PDEATHSIG, PTRACE_SEIZE = 1, 0x4206


class Target(msgspec.Struct):
    """A server, a file of its user, and a socket on which it listens."""

    pid: int
    file: str
    socket: str
    only: list[str] = []  # names of attacks; empty: all
    answers: list[bytes] = []  # datagrams that are sent in the place of an answer, before the process exits


def spec() -> decoder.DecoderSpec:
    return msgspec.json.decode(sys.argv[1], type=decoder.DecoderSpec)


def fork(start: Callable[[], int]) -> None:
    if start() == 0:
        os._exit(0)


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)


def of_files(to: Target) -> dict[str, Callable[[], object]]:
    """What Landlock denies in each version."""
    return {
        "read a file": lambda: open(to.file),
        "write a file": lambda: open(to.file, "r+"),
        "create a file": lambda: open(to.file + ".new", "x"),
        "list a directory": lambda: os.listdir("/"),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "ptrace": lambda: call_libc("ptrace", PTRACE_SEIZE, to.pid, 0, 0),
    }


def attacks(to: Target) -> dict[str, Callable[[], object]]:
    child = struct.pack("=11Q", *[0] * 4, signal.SIGCHLD, *[0] * 6)  # struct clone_args
    return of_files(to) | {
        "change a mode": lambda: os.chmod(to.file, 0o777),
        "control socket": lambda: connect(to.socket),
        "kill": lambda: os.kill(to.pid, signal.SIGWINCH),
        "tgkill": lambda: call_libc("tgkill", to.pid, to.pid, 0),
        "signal of a descriptor": lambda: fcntl.fcntl(spec().connection, fcntl.F_SETOWN, to.pid),
        "limits of the server": lambda: resource.prlimit(to.pid, resource.RLIMIT_NOFILE),
        "fork": lambda: fork(os.fork),
        "clone3": lambda: fork(lambda: call_libc("syscall", CLONE3, child, len(child))),
        "number of the x32 ABI": lambda: call_libc("syscall", X32 | 1, 2, b"x", 1),
        "new code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
        "outlive the server": lambda: call_libc("prctl", PR_SET_PDEATHSIG, 0, 0, 0, 0),
    }


def attack(data: mmap.mmap, *more: Any) -> NoReturn:
    """In the place of `image.decode_image`; it has filled much of the output memory."""
    to, outcomes = msgspec.json.decode(data[:], type=Target), {}
    os.write(2, b"forged line\n")
    for answer in to.answers:
        os.write(spec().connection, answer)
    if to.answers:
        os._exit(0)
    more[-1].__self__._output[: 1 << 27 : mmap.PAGESIZE] = 1
    for name, run in attacks(to).items():
        if not to.only or name in to.only:
            try:
                run()
                outcomes[name] = "done"
            except OSError as error:
                outcomes[name] = errno.errorcode[error.errno or 0]
    raise MediaError("image 1", msgspec.json.encode(outcomes).decode())


def decode_video(data: mmap.mmap, *more: Any, decode: Callable[..., Any] = video.decode_video) -> Any:
    return attack(data, *more) if data[:1] == b"{" else decode(data, *more)


if __name__ == "__main__":
    image.decode_image, video.decode_video = attack, decode_video
    if "without seccomp" in spec().title:
        sandbox._ARCHITECTURES.clear()
    if "without Landlock" in spec().title:
        sandbox._CREATE_RULESET = -1
    decoder.main()
