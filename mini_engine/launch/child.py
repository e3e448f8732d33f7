"""A child process, forked from the supervisor: from the fork to the role that it runs.

What a role imports first, libraries that take seconds, the supervisor imports once (`preload.py`): every process of
that role starts in a moment, as do those that replace dead ones, and all share the libraries' memory. To fork is safe
since the supervisor computes nothing, uses no device, and its other threads, ZMQ's and that of the log, are used by no
child.
"""

import gc
import importlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import zmq
from setproctitle import setproctitle

from mini_engine import log
from mini_engine.config import ConfigError
from mini_engine.failpoints import reach_failpoint
from mini_engine.launch.process_setup import STOP_SIGNALS, die_with_parent, ignore_stop_signals, keep_freed_memory
from mini_engine.messages import EngineLimits, Init, Ready, Refused, Role
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder

REFUSAL_SECONDS = 10  # within which the supervisor kills a process that refused its settings

ROLE_MODULES: dict[Role, str] = {
    "api": "mini_engine.http.api_process",
    "core": "mini_engine.core.engine_core",
    "worker": "mini_engine.worker.worker",
}


@dataclass(frozen=True)
class ChildSpec:
    """What a child is told when it is started. The descriptors are inherited."""

    role: Role
    index: str  # "0", or "engine.rank" for a worker
    init: Init
    supervisor: str  # ZMQ endpoint
    listen_fd: int | None = None  # API server: bound, not yet listening
    media_stores: Sequence[int] = ()  # descriptors of the media stores: an API server's by engine, a worker's own
    weights: int | None = None  # worker: memory that it shares with the same rank of other engines
    incarnation: int = field(default_factory=itertools.count(1).__next__)

    @property
    def name(self) -> str:
        """Such as `worker 0.1`."""
        return f"{self.role} {self.index}"


class Child:
    """One child process: its identity and its link to the supervisor.

    `supervisor` and `context` belong to the main thread. `encoder` may be shared.
    """

    def __init__(self, spec: ChildSpec):
        self.spec = spec
        self.encoder = Encoder(spec.name, spec.incarnation)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        me = sockets.identity(spec.name, spec.incarnation)
        self.supervisor = sockets.connect_dealer(self.context, spec.supervisor, me)

    def ready(self, limits: EngineLimits | None = None) -> None:
        """Report to the supervisor that this process can serve."""
        self.supervisor.send(self.encoder.encode(Ready(limits)))

    def refuse(self, reason: str) -> None:
        """Report to the supervisor that this process cannot be built, and wait to be killed: a process that exits by
        itself may take its last message with it."""
        self.supervisor.send(self.encoder.encode(Refused(reason)))
        self.supervisor.poll(REFUSAL_SECONDS * 1000)


def fork(spec: ChildSpec, environ: Mapping[str, str]) -> int:
    """Start a child with these variables beside this process's; returns its process id. Call it from the main thread,
    since the kernel's parent-death signal follows the thread. Raises OSError."""
    # A signal between the fork and the child's own handling of signals would reach the parent a second time.
    mask, own_pid = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS), os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _run_forked(spec, environ, mask, own_pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _run_forked(spec: ChildSpec, environ: Mapping[str, str], mask: set[int], parent_pid: int) -> NoReturn:
    """The whole life of a child. The parent's frames, which are below this one, are never returned to: the objects
    there refer to descriptors that are closed here."""
    status = 1
    try:
        die_with_parent(parent_pid)
        logging.getLogger().handlers.clear()  # the parent's, whose thread and perhaps lock stayed there
        signal.set_wakeup_fd(-1)
        ignore_stop_signals()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # whatever it means to the parent: see `ChildProcess.terminate`
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _keep_descriptors(spec)
        os.environ.update(environ)
        run_role(spec)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except Exception:
        logging.getLogger(__name__).exception("%s failed", spec.name)
    finally:
        try:
            for handler in logging.getLogger().handlers:
                handler.flush()
        finally:
            os._exit(status)


def _keep_descriptors(spec: ChildSpec) -> None:
    """Close all others, such as those whose end tells another process that the supervisor is dead."""
    inherited = sorted({2, *spec.media_stores, *(fd for fd in (spec.listen_fd, spec.weights) if fd is not None)})
    for lower, upper in itertools.pairwise([*inherited, os.sysconf("SC_OPEN_MAX")]):
        os.closerange(lower + 1, upper)
    os.dup2(2, 1)  # what libraries print is part of the log
    if not spec.init.config.debug:
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)  # as the lowest free descriptor


def run_role(spec: ChildSpec) -> None:
    """Set the process's title and log, and run the role. Raises SystemExit."""
    setproctitle(f"mini-engine: {spec.name}")
    if spec.role == "api":
        keep_freed_memory()
    reach_failpoint("starting-child")
    log.setup(spec.name, spec.init.config.log_level, spec.init.config.log_format)
    # API servers and workers enable collections once all is loaded; the core never does: it makes no reference cycles,
    # and with 100,000 cached items each would stop it for 100 ms.
    gc.disable()
    child = Child(spec)
    try:
        importlib.import_module(ROLE_MODULES[spec.role]).run(child)
    except ConfigError as error:
        child.refuse(str(error))
        sys.exit(1)
