"""A decoder that a file has taken over: the module that a decoder process runs, with attacks in the place of Pillow.

An image is JSON, a `Target`. The error of its job is JSON as well: by the name of each attack, how it failed.
"""

import ctypes
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

from mini_engine.media import decoder, image
from mini_engine.media.errors import MediaError
from mini_engine.media.sandbox import call_libc

CLONE, PRCTL = {"x86_64": (56, 157), "aarch64": (220, 167)}.get(os.uname().machine, (0, 0))
CALLS_OF = {"Landlock": (444, 1, 24), "seccomp": (PRCTL, 0, 22)}  # see `refuse_call`
IO_URING_SETUP, CLONE3 = 425, 435
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PTRACE_SEIZE = 1, 22, 38, 0x4206


class Target(msgspec.Struct):
    """A server, the sockets on which it listens, and a file of its user."""

    pid: int
    file: str
    path: str
    abstract: str
    port: int
    only: list[str] = []  # names of attacks; empty: all


def spec() -> decoder.DecoderSpec:
    return msgspec.json.decode(sys.argv[1], type=decoder.DecoderSpec)


def fork(start: Callable[[], int]) -> None:
    if start() == 0:
        os._exit(0)


def send(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(family, kind) as end:
        end.connect(address)
        end.send(b"x")


def listen() -> None:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))


def attacks(to: Target) -> dict[str, Callable[[], object]]:
    child = struct.pack("=11Q", *[0] * 4, signal.SIGCHLD, *[0] * 6)  # struct clone_args
    return {
        "read a file": lambda: open(to.file),
        "write a file": lambda: open(to.file, "r+"),
        "create a file": lambda: open(to.file + ".new", "x"),
        "delete a file": lambda: os.unlink(to.file),
        "list a directory": lambda: os.listdir("/"),
        "write the package": lambda: open(decoder.__file__, "r+"),
        "memory of the server": lambda: open(f"/proc/{to.pid}/mem", "rb"),
        "arguments of the server": lambda: open(f"/proc/{to.pid}/cmdline"),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "ptrace": lambda: call_libc("ptrace", PTRACE_SEIZE, to.pid, 0, 0),
        "change a mode": lambda: os.chmod(to.file, 0o777),
        "path socket": lambda: send(socket.AF_UNIX, to.path),
        "abstract socket": lambda: send(socket.AF_UNIX, to.abstract),
        "TCP": lambda: send(socket.AF_INET, ("127.0.0.1", to.port)),
        "TCP port": listen,
        "UDP": lambda: send(socket.AF_INET, ("127.0.0.1", to.port), socket.SOCK_DGRAM),
        "kill": lambda: os.kill(to.pid, signal.SIGWINCH),
        "kill all": lambda: os.kill(-1, 0),
        "tgkill": lambda: call_libc("tgkill", to.pid, to.pid, 0),
        "sigqueue": lambda: call_libc("sigqueue", to.pid, 0, 0),
        "pidfd": lambda: os.pidfd_open(to.pid),
        "signal of a descriptor": lambda: fcntl.fcntl(spec().connection, fcntl.F_SETOWN, to.pid),
        "process_vm_readv": lambda: call_libc("process_vm_readv", to.pid, bytes(16), 1, bytes(16), 1, 0),
        "limits of the server": lambda: resource.prlimit(to.pid, resource.RLIMIT_NOFILE),
        "priority of the server": lambda: os.setpriority(os.PRIO_PROCESS, to.pid, 19),
        "scheduler": lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
        "fork": lambda: fork(os.fork),
        "clone": lambda: fork(lambda: call_libc("syscall", CLONE, signal.SIGCHLD, 0, 0, 0, 0)),
        "clone3": lambda: fork(lambda: call_libc("syscall", CLONE3, child, len(child))),
        "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "io_uring": lambda: call_libc("syscall", IO_URING_SETUP, 1, bytes(120)),
        "number of the x32 ABI": lambda: call_libc("syscall", 0x40000000 | 1, 2, b"x", 1),
        "memfd": lambda: os.memfd_create("x"),
        "new code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
        "truncate shared memory": lambda: os.ftruncate(spec().input, 0),
        "outlive the server": lambda: call_libc("prctl", PR_SET_PDEATHSIG, 0, 0, 0, 0),
        "more descriptors": lambda: call_libc("setrlimit", resource.RLIMIT_NOFILE, struct.pack("@2L", 999, 999)),
    }


def attack(data: mmap.mmap, *_: object) -> NoReturn:
    """In the place of `image.decode_image`."""
    to, outcomes = msgspec.json.decode(data[:], type=Target), {}
    for name, run in attacks(to).items():
        if not to.only or name in to.only:
            try:
                run()
                outcomes[name] = "done"
            except OSError as error:
                outcomes[name] = errno.errorcode[error.errno or 0]
    raise MediaError("image 1", msgspec.json.encode(outcomes).decode())


def refuse_call(number: int, place: int, argument: int) -> None:
    """From now on this process and its children lack the system call `number` with this argument at `place`."""
    filters = [(0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 16 + 8 * place), (0x15, 0, 1, argument)]
    filters += [(0x06, 0, 0, 0x00050000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in filters))
    call_libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call_libc("prctl", PR_SET_SECCOMP, 2, struct.pack("@HP", len(filters), ctypes.addressof(code)))


if __name__ == "__main__":
    image.decode_image = attack
    decoder.main()
