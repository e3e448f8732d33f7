"""The start of every child process: die with the supervisor, set its title, send Hello, run its role.

Started as `python -m mini_engine.launch.child SPEC`, SPEC being a `ChildSpec` in JSON. Nothing heavy is imported before
the parent-death signal is set; each role's module is imported last.
"""

import gc
import importlib
import logging
import sys

import msgspec
import zmq

from mini_engine import log
from mini_engine.config import ConfigError
from mini_engine.failpoints import reach_failpoint
from mini_engine.launch.process_setup import die_with_parent, ignore_stop_signals, keep_freed_memory
from mini_engine.messages import EngineLimits, Hello, Init, Ready, Refused, Role, TransportChoice
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

REFUSAL_SECONDS = 10  # within which the supervisor kills a process that refused its settings

ROLE_MODULES: dict[Role, str] = {
    "api": "mini_engine.http.api_server",
    "core": "mini_engine.core.engine_core",
    "worker": "mini_engine.worker.worker",
}


class ChildSpec(msgspec.Struct, frozen=True):
    """What the supervisor gives a child on its command line."""

    role: Role
    index: str  # "0", or "engine.rank" for a worker
    incarnation: int
    parent_pid: int
    supervisor: str  # ZMQ endpoint
    log_level: str
    log_format: str
    listen_fd: int | None = None  # API server: inherited, bound, not yet listening
    media_stores: list[int] = []  # descriptors of the media stores: an API server's by engine, a worker's own

    @property
    def name(self) -> str:
        """Such as `worker 0.1`."""
        return f"{self.role} {self.index}"


class Child:
    """One child process: its identity and its link to the supervisor.

    `supervisor` and `context` belong to the main thread. `encoder` may be shared.
    """

    def __init__(self, spec: ChildSpec):
        self.index = spec.index
        self.incarnation = spec.incarnation
        self.listen_fd = spec.listen_fd
        self.media_stores = spec.media_stores
        self.name = spec.name
        self.encoder = Encoder(spec.name, spec.incarnation)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        me = sockets.identity(spec.name, spec.incarnation)
        self.supervisor = sockets.connect_dealer(self.context, spec.supervisor, me)
        self.supervisor.send(self.encoder.encode(Hello()))

    def init(self) -> Init:
        """Block until the supervisor has answered the Hello."""
        while not isinstance(body := decode(self.supervisor.recv()).body, Init):
            pass  # another process died meanwhile
        return body

    def ready(self, limits: EngineLimits | None = None, transports: list[TransportChoice] | None = None) -> None:
        """Report to the supervisor that this process can serve."""
        self.supervisor.send(self.encoder.encode(Ready(limits, transports or [])))

    def refuse(self, reason: str) -> None:
        """Report to the supervisor that this process cannot be built, and wait to be killed: a process that exits by
        itself may take its last message with it."""
        self.supervisor.send(self.encoder.encode(Refused(reason)))
        self.supervisor.poll(REFUSAL_SECONDS * 1000)


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=ChildSpec)
    die_with_parent(spec.parent_pid)
    ignore_stop_signals()
    from setproctitle import setproctitle

    setproctitle(f"mini-engine: {spec.name}")
    if spec.role == "api":
        keep_freed_memory()  # before the first thread, which writes the log
    reach_failpoint("starting-child")
    log.setup(spec.name, spec.log_level, spec.log_format)
    # Collections would take a quarter of the imports' time. API servers and workers enable them once all is loaded; the
    # core never does: it makes no reference cycles, and with 100,000 cached items each would stop it for 100 ms.
    gc.disable()
    child = Child(spec)
    try:
        importlib.import_module(ROLE_MODULES[spec.role]).run(child)
    except ConfigError as error:
        child.refuse(str(error))
        sys.exit(1)
    except Exception:
        logging.getLogger(__name__).exception("%s failed", child.name)
        sys.exit(1)


if __name__ == "__main__":
    main()
