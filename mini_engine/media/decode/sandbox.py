"""The sandbox of a decoder process: code that a crafted file injects can compute, and answer the API server.

Landlock denies all paths; a seccomp filter denies all system calls but those of decoding. Either is enough to deny
files. Both are set by ctypes. Knows nothing of decoding beyond its calls.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import struct

from mini_engine.launch.process_setup import be_expendable

_PR_SET_NAME, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 15, 22, 38  # linux/prctl.h
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h, version 3
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's calls, on all machines
_RULESET_VERSION, _RULE_PATH_BENEATH = 1, 1  # linux/landlock.h
_MODE_FILTER, _ALLOW, _ERRNO = 2, 0x7FFF0000, 0x00050000  # linux/seccomp.h
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # linux/filter.h, all of a constant and 32 bits
_CLONE_THREAD = 0x10000  # linux/sched.h
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h

# The calls of decoding and their numbers, as in _ARCHITECTURES (asm/unistd_64.h, asm-generic/unistd.h). `newfstatat`
# is fstat(3) of glibc 2.33 to 2.38. FFmpeg opens tables of character sets, for the names of streams: it does without.
_CALLS = {
    "brk": (12, 214), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "close": (3, 57), "exit": (60, 93),
    "exit_group": (231, 94), "fstat": (5, 80), "futex": (202, 98), "getcpu": (309, 168), "getpid": (39, 172),
    "getrandom": (318, 278), "gettid": (186, 178), "gettimeofday": (96, 169), "madvise": (28, 233),
    "mremap": (25, 216), "munmap": (11, 215), "newfstatat": (262, 79), "pread64": (17, 67), "recvfrom": (45, 207),
    "restart_syscall": (219, 128), "rseq": (334, 293), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sched_getaffinity": (204, 123), "sched_yield": (24, 124), "sendto": (44, 206),
    "set_robust_list": (273, 99), "sigaltstack": (131, 132), "sysinfo": (99, 179), "write": (1, 64),
    "writev": (20, 66),
}  # fmt: skip
_CLONE3 = 435
_RENAME = (82, 38)  # renameat on aarch64
_libc = ctypes.CDLL(None, use_errno=True)


def enter_sandbox(descriptors: int, directory: str | None = None) -> list[str]:
    """Give up privileges, paths, signals, sockets, other processes, standard error, and more open files than
    `descriptors`. Returns the parts that the kernel refuses, each with the reason. Call it before the first thread,
    which would not be confined, and after all imports. `directory`: of fail points, where files may be renamed."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))
    be_expendable()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    os.dup2(1, 2)  # the log of the server
    missing = []
    for name, confine in (("Landlock", _deny_paths), ("seccomp", _filter_calls)):
        try:
            confine(directory)
        except OSError as error:
            missing.append(f"{name} ({error.strerror})")
    return missing


def call_libc(name: str, *arguments: int | bytes) -> int:
    """A function of libc that returns -1 on errors. Raises OSError."""
    result: int = getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return result


def _deny_paths(directory: str | None) -> None:
    """And what else the kernel's Landlock can deny: TCP since Linux 6.7, signals and abstract sockets since 6.12."""
    version = call_libc("syscall", _CREATE_RULESET, 0, 0, _RULESET_VERSION)
    files = (1 << (16 if version >= 5 else 15 if version >= 3 else 12 + version)) - 1
    tcp, scopes = 3 * (version >= 4), 3 * (version >= 6)
    # struct landlock_ruleset_attr: access to files, access to the network, scopes.
    ruleset = call_libc("syscall", _CREATE_RULESET, struct.pack("=3Q", files, tcp, scopes), 24, 0)
    if directory is not None:
        parent = os.open(directory, os.O_PATH)
        call_libc("syscall", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", files, parent), 0)
        os.close(parent)
    call_libc("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _filter_calls(directory: str | None) -> None:
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no call numbers for {machine}")
    column = list(_ARCHITECTURES).index(machine)
    allow, deny = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    # Instructions: code, jumps if true and if false, constant. They read struct seccomp_data: the call's number, the
    # architecture, an address, and six arguments of 64 bits.
    program = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]), deny, (_LOAD, 0, 0, 0)]

    def oncall(number: int, *body: tuple[int, int, int, int]) -> None:
        program.extend([(_JUMP_IF_EQUAL, 0, len(body), number), *body])

    for numbers in (*_CALLS.values(), *([_RENAME] if directory is not None else [])):
        oncall(numbers[column], allow)
    for numbers, argument, mask, expected in (  # allowed if (argument & mask) == expected
        ((56, 220), 0, _CLONE_THREAD, _CLONE_THREAD),  # clone
        ((9, 222), 2, mmap.PROT_EXEC, 0),  # mmap
        ((10, 226), 2, mmap.PROT_EXEC, 0),  # mprotect
        ((72, 25), 1, 0xFFFFFFFF, fcntl.F_DUPFD_CLOEXEC),  # fcntl: with F_SETOWN a descriptor sends signals
        ((157, 167), 0, 0xFFFFFFFF, _PR_SET_NAME),  # prctl
        ((302, 261), 0, 0xFFFFFFFF, 0),  # prlimit64, of this process
        ((234, 131), 0, 0xFFFFFFFF, os.getpid()),  # tgkill, for abort(3)
    ):
        low_word = (_LOAD, 0, 0, 16 + 8 * argument)
        oncall(numbers[column], low_word, (_AND, 0, 0, mask), (_JUMP_IF_EQUAL, 0, 1, expected), allow, deny)
    oncall(_CLONE3, (_RETURN, 0, 0, _ERRNO | errno.ENOSYS))  # its flags are in memory; libc falls back to clone
    program.append(deny)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    call_libc("prctl", _PR_SET_SECCOMP, _MODE_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)), 0, 0)
