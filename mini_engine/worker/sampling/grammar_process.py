"""The processes that compile and follow grammars: a manager beside rank 0, and one for each grammar.

    rank 0  <-- requests, problems; reports -->  manager  -- fork -->  one process per grammar
                                                 (tokenizer)            compiles; fills masks in shared memory

A few lines of a grammar can take hours or all memory, which no setting of llguidance prevents. So each grammar has a
process, and timers and limits of the kernel end the one that takes too much. The manager runs nothing of a grammar and
starts no thread, so it always answers in time.
`grammar.py` is rank 0's end.
"""

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from setproctitle import setproctitle

from mini_engine.launch.process_setup import die_with_parent, ignore_stop_signals
from mini_engine.messages import Grammar, GrammarReady
from mini_engine.worker.sampling.matchers import MaskVocabulary, Matchers, Row

COMPILE_SECONDS = 1  # of processor time, with the first mask
# Of private memory, beyond what the manager has: a schema of 100,000 characters takes 50 MB, and 64 outputs 20 MB more.
MEMORY_BYTES = 128 << 20
# Of processor time for the masks of a step: besides what the model takes, which hides them, the processes share
# `STEP_SECONDS`, and have `ROW_SECONDS` for each row. What they take more comes out of `SPARE_SECONDS` of each, of
# which they share as much in a step; what they take less goes there.
STEP_SECONDS, ROW_SECONDS, SPARE_SECONDS, LEAST_SPARE = 0.01, 0.0005, 0.06, 0.01
STALLED_SECONDS = 1.0  # of wall time longer than the model, since a busy machine is no fault of a grammar
REFUSED_SECONDS, REFUSED = 600, 1000  # for how long, and how many grammars that exceeded a limit
RECEIVED_BYTES = 65536  # at a time
PAUSE_SECONDS = 5  # before the next grammar of a client is compiled after one that has delayed steps

TOO_MUCH = f"The grammar of this request {{}}; send a simpler one. It is refused for {REFUSED_SECONDS // 60} minutes."
SLOW_COMPILE = TOO_MUCH.format(f"takes more than {COMPILE_SECONDS} s of processor time to compile")
SLOW_MASK = TOO_MUCH.format(f"delays steps by more than {SPARE_SECONDS * 1000:.0f} ms beyond the model")
LARGE = TOO_MUCH.format(f"takes more than {MEMORY_BYTES >> 20} MiB of memory")
KILLED = "The process of this request's grammar was killed; send the request again."


class ManagerSpec(msgspec.Struct, frozen=True):
    """Arguments of the manager."""

    parent_pid: int
    title: str  # of the process
    tokenizer: str  # path
    rows: int  # at most in a step; and grammars of a client at once; of all clients four times as many
    requests: int  # descriptors
    reports: int
    masks: int


class ManagerRequest(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0 -> manager. Each of `grammars` is reported by a `GrammarReady`. If there are `rows`, the answer is a
    problem for each of them, a text for the client; where it is empty, the row's mask is there."""

    grammars: list[Grammar] = []
    unused: list[bytes] = []  # digests; those that are not reported yet never are
    finished: list[tuple[bytes, str]] = []  # digests and outputs
    rows: list[Row] = []
    seconds: float = 0.0  # that the model takes for the step


class MaskWork(msgspec.Struct, frozen=True, array_like=True):
    """Manager -> a grammar's process, once that has reported by one problem, perhaps empty, that it is compiled. The
    answer is a problem for each row."""

    finished: list[str] = []  # outputs
    rows: list[tuple[int, Row]] = []  # with the places of their masks
    seconds: float = 0.0  # of processor time for the masks
    spare: float = 0.0  # of the process's spare seconds, at most


_encode, _problems = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(list[str])


@dataclass
class _Process:
    """The process of a grammar, as the manager sees it."""

    pid: int
    connection: socket.socket
    grammar: Grammar
    is_compiled: bool = False
    finished: list[str] = field(default_factory=list)  # outputs that it is to drop before it fills the next masks


class Manager:
    """Starts, asks and kills the processes of grammars. Owns both connections."""

    def __init__(self, vocabulary: MaskVocabulary, requests: Connection, reports: Connection) -> None:
        self._vocabulary, self._requests, self._reports = vocabulary, requests, reports
        self._processes: dict[bytes, _Process] = {}  # by digest
        self._queues: dict[bytes, dict[bytes, Grammar]] = {}  # by client, the one that was served last is the last
        self._pauses: dict[bytes, float] = {}  # until when, by client
        self._compiling = max(1, len(os.sched_getaffinity(0)) // 2)  # at most; of a client one
        self._refused: dict[bytes, tuple[float, str]] = {}  # until when, and why
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, self._take_request)

    def serve(self) -> None:
        """Until rank 0 closes its connection: raises EOFError."""
        while True:
            # A pause ends at most a second late.
            for key, _ in self._selector.select(1 if self._pauses and self._queues else None):
                if key.fd in self._selector.get_map():  # not ended meanwhile
                    key.data()
            if self._queues:
                self._start_queued()

    def _take_request(self) -> None:
        request = msgspec.msgpack.decode(self._requests.recv_bytes(), type=ManagerRequest)
        for digest in request.unused:
            if digest in self._processes:
                self._end(digest)
            for queue in self._queues.values():
                queue.pop(digest, None)
        for grammar in request.grammars:
            if problem := self._refusal(grammar.digest):
                self._report(grammar, problem)
            else:
                self._queues.setdefault(grammar.client, {})[grammar.digest] = grammar
        if request.rows or request.finished:
            self._fill_masks(request)

    def _fill_masks(self, request: ManagerRequest) -> None:
        """Have the masks of a step's rows filled, all processes at once, and send their problems."""
        problems, busy = [KILLED] * len(request.rows), list[tuple[_Process, list[int]]]()
        rows = defaultdict[bytes, list[tuple[int, Row]]](list)
        for digest, request_id in request.finished:
            if digest in self._processes:
                self._processes[digest].finished.append(request_id)
        for place, row in enumerate(request.rows):
            rows[row.digest].append((place, row))
        share, deadline = 1 / max(1, len(rows)), time.monotonic() + request.seconds + STALLED_SECONDS
        seconds, spare = share * (request.seconds + STEP_SECONDS), max(LEAST_SPARE, share * SPARE_SECONDS)
        for digest in rows:
            places, process = [place for place, _ in rows[digest]], self._processes.get(digest)
            if process is None:
                for place in places:
                    problems[place] = self._refusal(digest) or KILLED
                continue
            gone, process.finished = process.finished, []
            work = MaskWork(gone, rows[digest], seconds + ROW_SECONDS * len(places), spare)
            with contextlib.suppress(OSError):  # it was killed or is stalled, as the next read shows
                process.connection.sendall(_encode(work))
            busy.append((process, places))
        for process, places in reversed(busy):  # the others have mostly answered by then: fewer switches
            for place, problem in zip(places, self._wait_for(process, len(places), deadline), strict=True):
                problems[place] = problem
        if request.rows:
            self._requests.send_bytes(_encode(problems))

    def _wait_for(self, process: _Process, rows: int, deadline: float) -> list[str]:
        """The problems of its rows."""
        process.connection.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            return _receive(process.connection)
        except (EOFError, OSError):
            problem = self._on_exit(process)
            if problem != KILLED:
                self._pauses[process.grammar.client] = time.monotonic() + PAUSE_SECONDS
            return [problem] * rows

    def _take_report(self, process: _Process) -> None:
        """A process has compiled its grammar, or exited."""
        try:
            [problem] = _receive(process.connection)
            if problem:
                self._end(process.grammar.digest)
        except (EOFError, OSError):
            problem = self._on_exit(process)
        if not process.is_compiled:
            process.is_compiled = True
            self._report(process.grammar, problem)

    def _on_exit(self, process: _Process) -> str:
        """A process has exceeded a limit or was killed, or is killed now, as it is stalled. Returns the problem."""
        digest, problem = process.grammar.digest, LARGE
        status = os.WTERMSIG(self._end(digest))
        if status == signal.SIGKILL:
            return KILLED
        if status == signal.SIGPROF:
            problem = SLOW_MASK if process.is_compiled else SLOW_COMPILE
        self._refused[digest] = time.monotonic() + REFUSED_SECONDS, problem
        if len(self._refused) > REFUSED:
            del self._refused[next(iter(self._refused))]
        return problem

    def _refusal(self, digest: bytes) -> str:
        """Why a grammar is refused; empty: it is not."""
        until, problem = self._refused.get(digest, (0.0, ""))
        if time.monotonic() < until:
            return problem
        self._refused.pop(digest, None)
        return ""

    def _report(self, grammar: Grammar, problem: str) -> None:
        self._reports.send_bytes(msgspec.msgpack.encode(GrammarReady(grammar.number, grammar.digest, problem)))

    def _start_queued(self) -> None:
        """Clients take turns. Of each one grammar at a time is compiled, and none may have all places."""
        now, rows = time.monotonic(), self._vocabulary.rows
        self._pauses = {client: until for client, until in self._pauses.items() if until > now}
        processes = self._processes.values()
        compiling = {process.grammar.client for process in processes if not process.is_compiled}
        used = Counter(process.grammar.client for process in processes)
        for client in list(self._queues):
            if not self._queues[client]:
                del self._queues[client]
            elif len(compiling) == self._compiling or len(self._processes) >= 4 * rows:
                return
            elif client not in compiling and client not in self._pauses and used[client] < rows:
                queue = self._queues[client] = self._queues.pop(client)
                self._start(queue.pop(next(iter(queue))))
                compiling.add(client)

    def _start(self, grammar: Grammar) -> None:
        manager = os.getpid()
        try:
            own_end, child_end = socket.socketpair()
            pid = os.fork()
        except OSError as error:
            self._report(grammar, f"The grammar of this request gets no process: {error.strerror}; retry later.")
            return
        if pid == 0:
            try:
                _follow(self._vocabulary, grammar.text, child_end, manager)
            finally:
                os._exit(1)  # whatever happened: the manager's code ends here
        child_end.close()
        self._processes[grammar.digest] = process = _Process(pid, own_end, grammar)
        self._selector.register(own_end, selectors.EVENT_READ, partial(self._take_report, process))

    def _end(self, digest: bytes) -> int:
        """Returns its exit status. It writes no mask from here on."""
        process = self._processes.pop(digest)
        os.kill(process.pid, signal.SIGKILL)
        _, status = os.waitpid(process.pid, 0)
        self._selector.unregister(process.connection)
        process.connection.close()
        return status


def _receive(connection: socket.socket, decoder: msgspec.msgpack.Decoder[Any] = _problems) -> Any:
    """The next message, which none follows before it is answered. A `Connection` would read twice, and has more to run
    in each process. Raises EOFError, OSError."""
    received = b""
    while part := connection.recv(RECEIVED_BYTES):
        received += part
        try:
            return decoder.decode(received)
        except msgspec.DecodeError:
            continue  # its end is yet to come
    raise EOFError


def _follow(vocabulary: MaskVocabulary, grammar: str, connection: socket.socket, manager: int) -> None:
    """What a grammar's process does, until it is killed."""
    die_with_parent(manager)
    setproctitle("mini-engine: grammar")
    _limit(connection.fileno())
    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)  # Python does not handle its signal, which ends the process
    matchers = Matchers(vocabulary, grammar)
    signal.setitimer(signal.ITIMER_PROF, 0)
    connection.sendall(_encode([matchers.problem]))
    decoder, spare = msgspec.msgpack.Decoder(MaskWork), SPARE_SECONDS
    while True:
        work = _receive(connection, decoder)
        matchers.drop(work.finished)
        if work.rows:
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, work.seconds + min(spare, work.spare))
            problems = matchers.fill(work.rows)
            signal.setitimer(signal.ITIMER_PROF, 0)
            spare = max(0.0, min(SPARE_SECONDS, spare + work.seconds - (time.process_time() - begun)))
            connection.sendall(_encode(problems))


def _limit(connection: int) -> None:
    """Bound what this process takes, and keep this descriptor alone: by it the manager sees that a process exited."""
    os.closerange(3, connection)
    os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
    os.close(2)  # llguidance's last words could hold a client's lines
    os.open(os.devnull, os.O_WRONLY)  # gets the lowest number, which is 2
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, the kernel kills this process first
    # What RLIMIT_DATA bounds: private memory, written or not.
    memory = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # no core dump; with 0 a pipe of core_pattern still gets one
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def main() -> NoReturn:
    """Main function of the manager; its argument is a `ManagerSpec` as JSON."""
    ignore_stop_signals()
    spec = msgspec.json.decode(sys.argv[1], type=ManagerSpec)
    die_with_parent(spec.parent_pid)
    setproctitle(spec.title)
    vocabulary = MaskVocabulary(Path(spec.tokenizer), spec.masks, spec.rows)
    gc.freeze()  # what is loaded stays shared by all processes: the collector need not write to it
    with contextlib.suppress(EOFError):
        Manager(vocabulary, Connection(spec.requests), Connection(spec.reports, readable=False)).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
