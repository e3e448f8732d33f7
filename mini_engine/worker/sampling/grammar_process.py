"""The processes that compile and follow grammars: a manager beside rank 0, and one for each grammar.

    rank 0  -- requests -->  manager      -- fork, work -->  one process per grammar
            <-- reports  --  (tokenizer)                     compiles; fills masks in shared memory
            <------------------------- answers -------------

A few lines of a grammar can take hours or all memory, which no setting of llguidance prevents. So each grammar has a
process, and timers and limits of the kernel end the one that takes too much. A process whose grammar is unused is kept
for the same grammar or another one: to start a process takes longer than to compile most grammars. The manager runs
nothing of a grammar, starts no thread and never waits for rank 0, which receives answers in steps only; so it always
answers in time. `grammar.py` is rank 0's end.
"""

import contextlib
import gc
import itertools
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

from mini_engine.launch.process_setup import be_expendable, die_with_parent, ignore_stop_signals
from mini_engine.messages import Grammar, GrammarReady, Problem
from mini_engine.worker.sampling.matchers import MaskVocabulary, Matchers, Row

# The limits of a grammar's process. Of processor time to compile the grammar, with the first mask:
COMPILE_SECONDS = 1
# Of private memory, beyond what is there before it compiles: a schema of 100,000 characters takes 50 MB, and 64 outputs
# 20 MB more.
MEMORY_BYTES = 128 << 20
IDLE_BYTES = 16 << 20  # of it that a process may have to be kept
# Of processor time for the masks of a step. While the model runs they delay nothing; beyond that all processes share
# STEP_SECONDS, and each has ROW_SECONDS for each of its rows. A process that takes more uses up its SPARE_SECONDS, and
# one that takes less gets them back. In one step all may use as many together, each at least LEAST_SPARE.
STEP_SECONDS, ROW_SECONDS, SPARE_SECONDS, LEAST_SPARE = 0.01, 0.0005, 0.06, 0.01
# On the clock, without a report or an answer and without any processor time: the process is stopped. One that runs has
# the limits above, however little of a busy machine it gets.
STALLED_COMPILE_SECONDS, STALLED_SECONDS = 5, 0.5
REFUSED_SECONDS, MAX_REFUSED = 600, 1000  # for how long, and how many, grammars that exceeded a limit are refused
PAUSE_SECONDS = 5  # before the next grammar of a client is compiled after one that has delayed steps

RECEIVED_BYTES = 4096  # at a time
ANSWER_BYTES = 1 << 20  # of a `MaskAnswer`, at most: more than a socket takes at once, as is one for 50,000 rows

TOO_MUCH = f"The grammar of this request {{}}; send a simpler one. It is refused for {REFUSED_SECONDS // 60} minutes."
SLOW_COMPILE = Problem(TOO_MUCH.format(f"takes more than {COMPILE_SECONDS} s of processor time to compile"))
SLOW_MASK = Problem(TOO_MUCH.format(f"delays steps by more than {SPARE_SECONDS * 1000:.0f} ms beyond the model"))
LARGE = Problem(TOO_MUCH.format(f"takes more than {MEMORY_BYTES >> 20} MiB of memory"))
KILLED = Problem("The process of this request's grammar was killed; send the request again.", retry=True)


class ManagerSpec(msgspec.Struct, frozen=True):
    """Arguments of the manager."""

    parent_pid: int
    title: str  # of the process
    tokenizer: str  # path
    rows: int  # at most in a step; and grammars of a client at once; of all clients four times as many
    requests: int  # descriptors
    reports: int
    answers: int
    masks: int


class ManagerRequest(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0 -> manager. Each of `grammars` is reported by a `GrammarReady`, each of `rows` in a `MaskAnswer`."""

    grammars: list[Grammar] = []
    unused: list[bytes] = []  # digests; those that are not reported yet never are
    finished: list[tuple[bytes, str]] = []  # digests and outputs
    step: int = 0  # a number for the rows
    rows: list[Row] = []
    seconds: float = 0.0  # that the model takes for the step
    stalled: list[bytes] = []  # digests whose rows were not answered in time


class MaskWork(msgspec.Struct, frozen=True, array_like=True):
    """Manager -> a grammar's process, once that has reported by a problem or none that it is compiled. After the work
    may come the text of another grammar, which is reported likewise."""

    step: int
    finished: list[str]  # outputs
    rows: list[tuple[int, Row]]  # with the indices of their masks
    seconds: float  # of processor time for the masks
    spare: float  # of the process's spare seconds, at most


class MaskAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A grammar's process, or the manager if that has ended, -> rank 0, which receives it once the model has run: so it
    wakes no process."""

    step: int
    masks: list[int]  # indices of the masks of some rows of the step
    problem: Problem | None  # why none of these could be filled; None: all are filled


_encode = msgspec.msgpack.Encoder().encode


@dataclass
class _Process:
    """The process of a grammar, as the manager sees it."""

    pid: int
    connection: socket.socket
    grammar: Grammar
    last_run: float = field(default_factory=time.monotonic)  # when it was last found to run
    cpu_seconds: float = 0.0  # until then
    is_compiled: bool = False
    finished: list[str] = field(default_factory=list)  # outputs that it is to drop before it fills the next masks
    step: int = 0  # the last for which it had rows
    masks: list[int] = field(default_factory=list)  # of these

    def poll_has_run(self) -> bool:
        """Whether it has taken processor time since the last call."""
        before, self.cpu_seconds = self.cpu_seconds, time.clock_gettime(~self.pid << 3 | 2)  # clock_getcpuclockid(3)
        if self.cpu_seconds > before:
            self.last_run = time.monotonic()
        return self.cpu_seconds > before


class Manager:
    """Starts, asks and kills the processes of grammars. Owns the connections; the processes have `answers`, too."""

    def __init__(
        self, vocabulary: MaskVocabulary, requests: Connection, reports: Connection, answers: socket.socket
    ) -> None:
        self._vocabulary, self._requests, self._reports, self._answers = vocabulary, requests, reports, answers
        self._unsent = deque[bytes]()  # answers that the socket has no room for
        self._processes: dict[bytes, _Process] = {}  # in use, by digest
        self._idle: dict[bytes, _Process] = {}  # by the digest that they have compiled, the longest unused first
        self._queues: dict[bytes, dict[bytes, Grammar]] = {}  # by client, the one that was served last is the last
        self._pauses: dict[bytes, float] = {}  # until when, by client
        self._max_compiling = max(1, len(os.sched_getaffinity(0)) // 2)  # at most; of a client one
        self._refused: dict[bytes, tuple[float, Problem]] = {}  # until when, and why
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, self._on_request)

    def serve(self) -> None:
        """Until rank 0 closes its connection: raises EOFError."""
        while True:
            compiling = [process for process in self._processes.values() if not process.is_compiled]
            # A pause ends at most a second late, and so does a compile that is stalled.
            for key, _ in self._selector.select(1 if compiling or (self._pauses and self._queues) else None):
                if key.fd in self._selector.get_map():  # not ended meanwhile
                    key.data()
            for process in compiling:
                if process.is_compiled or self._processes.get(process.grammar.digest) is not process:
                    continue  # reported or ended meanwhile
                if not process.poll_has_run() and time.monotonic() - process.last_run > STALLED_COMPILE_SECONDS:
                    self._on_exit(process)
            while self._queues and self._start_next():
                pass

    def _on_request(self) -> None:
        request = msgspec.msgpack.decode(self._requests.recv_bytes(), type=ManagerRequest)
        for digest, request_id in request.finished:
            if digest in self._processes:
                self._processes[digest].finished.append(request_id)
        for digest in request.unused:
            if digest in self._processes:
                self._keep_idle(self._processes.pop(digest))
            for queue in self._queues.values():
                queue.pop(digest, None)
        for grammar in request.grammars:
            if problem := self._refusal(grammar.digest):
                self._report(grammar, problem)
            else:
                self._queues.setdefault(grammar.client, {})[grammar.digest] = grammar
        for digest in request.stalled:
            if digest in self._processes and not self._processes[digest].poll_has_run():
                self._on_exit(self._processes[digest])
        if request.rows:
            self._send_work(request)

    def _send_work(self, request: ManagerRequest) -> None:
        """Have the masks of a step's rows filled, by all processes at once."""
        rows = defaultdict[bytes, list[tuple[int, Row]]](list)
        for index, row in enumerate(request.rows):
            rows[row.digest].append((index, row))
        share = 1 / len(rows)
        seconds, spare = share * (request.seconds + STEP_SECONDS), max(LEAST_SPARE, share * SPARE_SECONDS)
        for digest, own in rows.items():
            masks, process = [index for index, _ in own], self._processes.get(digest)
            if process is None:
                self._answer(MaskAnswer(request.step, masks, self._refusal(digest) or KILLED))
                continue
            work = MaskWork(request.step, process.finished, own, seconds + ROW_SECONDS * len(own), spare)
            process.finished, process.step, process.masks = [], request.step, masks
            with contextlib.suppress(OSError):  # it was killed or is stalled, as is found later
                process.connection.sendall(_encode(work))

    def _on_report(self, process: _Process) -> None:
        """A process has compiled its grammar, or exited."""
        try:
            problem = msgspec.msgpack.decode(process.connection.recv(RECEIVED_BYTES), type=Problem | None)
        except (msgspec.DecodeError, OSError):
            self._on_exit(process)
            return
        process.is_compiled = True
        if problem:
            self._end(self._processes.pop(process.grammar.digest))
        self._report(process.grammar, problem)

    def _on_exit(self, process: _Process) -> None:
        """A process has exceeded a limit or was killed, or is killed now, as it is stalled."""
        digest, problem = process.grammar.digest, LARGE
        is_idle = self._idle.pop(digest, None) is not None
        status = self._end(process)
        if is_idle:
            return
        del self._processes[digest]
        if status == signal.SIGKILL:
            problem = KILLED
        else:
            if status == signal.SIGPROF:
                problem = SLOW_MASK if process.is_compiled else SLOW_COMPILE
            self._refused[digest] = time.monotonic() + REFUSED_SECONDS, problem
            if len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            if process.is_compiled:
                self._pauses[process.grammar.client] = time.monotonic() + PAUSE_SECONDS
        if process.is_compiled:
            self._answer(MaskAnswer(process.step, process.masks, problem))  # perhaps once more, or late
        else:
            self._report(process.grammar, problem)

    def _answer(self, answer: MaskAnswer) -> None:
        if not self._unsent:
            self._selector.register(self._answers, selectors.EVENT_WRITE, self._send_answers)
        self._unsent.append(_encode(answer))
        self._send_answers()

    def _send_answers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._answers.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent.popleft()
            self._selector.unregister(self._answers)

    def _refusal(self, digest: bytes) -> Problem | None:
        """Why a grammar is refused, if it is."""
        until, problem = self._refused.get(digest, (0.0, None))
        if time.monotonic() < until:
            return problem
        self._refused.pop(digest, None)
        return None

    def _report(self, grammar: Grammar, problem: Problem | None) -> None:
        self._reports.send_bytes(msgspec.msgpack.encode(GrammarReady(grammar.number, grammar.digest, problem)))

    def _start_next(self) -> bool:
        """Clients take turns. Of each one grammar at a time is compiled, and none may have all processes. False: all
        that are queued have to wait."""
        now, rows = time.monotonic(), self._vocabulary.rows
        self._pauses = {client: until for client, until in self._pauses.items() if until > now}
        processes = self._processes.values()
        compiling = {process.grammar.client for process in processes if not process.is_compiled}
        used = Counter(process.grammar.client for process in processes)
        for client in list(self._queues):
            if not self._queues[client]:
                del self._queues[client]
            elif len(compiling) == self._max_compiling or len(self._processes) >= 4 * rows:
                return False
            elif client not in compiling and client not in self._pauses and used[client] < rows:
                queue = self._queues[client] = self._queues.pop(client)
                self._start(queue.pop(next(iter(queue))))
                return True
        return False

    def _start(self, grammar: Grammar) -> None:
        if (idle := self._idle.pop(grammar.digest, None)) is not None:  # it has compiled this one
            self._processes[grammar.digest], idle.grammar = idle, grammar
            self._report(grammar, None)
            return
        try:
            pid, connection = self._reuse(grammar) or self._fork(grammar)
        except OSError as error:
            if self._idle:  # they have what this one lacks
                self._end(self._idle.pop(next(iter(self._idle))))
                self._start(grammar)
                return
            text = f"The grammar of this request gets no process: {error.strerror}; send the request again later."
            self._report(grammar, Problem(text, retry=True))
            return
        self._processes[grammar.digest] = process = _Process(pid, connection, grammar)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._on_report, process))

    def _reuse(self, grammar: Grammar) -> tuple[int, socket.socket] | None:
        """Have the process that was unused for longest compile the grammar, if there are as many as rows. None: it gets
        a new one."""
        if not self._idle or len(self._idle) + len(self._processes) < self._vocabulary.rows:
            return None
        process, encoded = self._idle.pop(next(iter(self._idle))), _encode(grammar.text)
        with contextlib.suppress(OSError):  # it was killed
            if process.connection.send(encoded) == len(encoded):  # else it is stopped, or the grammar is large
                self._selector.unregister(process.connection)
                return process.pid, process.connection
        self._end(process)
        return None

    def _fork(self, grammar: Grammar) -> tuple[int, socket.socket]:
        manager = os.getpid()
        own_end, child_end = socket.socketpair()
        own_end.settimeout(STALLED_SECONDS)
        pid = os.fork()
        if pid == 0:
            try:
                _run(self._vocabulary, grammar.text, child_end, self._answers, manager)
            finally:
                os._exit(1)  # whatever happened: the manager's code ends here
        child_end.close()
        return pid, own_end

    def _keep_idle(self, process: _Process) -> None:
        """Keep the process of an unused grammar, unless it compiles it or has much memory; as many as rows at most."""
        is_small = False
        with contextlib.suppress(OSError):  # out of file descriptors
            is_small = private_bytes(process.pid) - private_bytes(os.getpid()) <= IDLE_BYTES
        if not (process.is_compiled and is_small):
            self._end(process)
            return
        self._idle[process.grammar.digest] = process
        if len(self._idle) > self._vocabulary.rows:
            self._end(self._idle.pop(next(iter(self._idle))))

    def _end(self, process: _Process) -> int:
        """Returns its exit status. It writes no mask from here on."""
        os.kill(process.pid, signal.SIGKILL)
        _, status = os.waitpid(process.pid, 0)
        self._selector.unregister(process.connection)
        process.connection.close()
        return status


# --- the process of a grammar ----------------------------------------------------------------------------------------


def _run(
    vocabulary: MaskVocabulary, grammar: str, connection: socket.socket, answers: socket.socket, manager: int
) -> None:
    """What a grammar's process does, until it is killed."""
    die_with_parent(manager)
    setproctitle("mini-engine: grammar")
    _isolate({connection.fileno(), answers.fileno()})
    while True:
        memory = private_bytes(os.getpid()) + MEMORY_BYTES  # what RLIMIT_DATA bounds, beyond what is there
        resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        grammar = _fill_masks(_compile(vocabulary, grammar), connection, answers)


def _compile(vocabulary: MaskVocabulary, grammar: str) -> Matchers:
    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)  # Python does not handle its signal, which ends the process
    matchers = Matchers(vocabulary, grammar)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return matchers


def _fill_masks(matchers: Matchers, connection: socket.socket, answers: socket.socket) -> str:
    """Report a compiled grammar, and fill masks until the manager sends another grammar, which is returned."""
    decoder, spare = msgspec.msgpack.Decoder(MaskWork | str), SPARE_SECONDS
    connection.sendall(_encode(matchers.problem))
    while isinstance(work := _receive(connection, decoder), MaskWork):
        matchers.drop(work.finished)
        limit = work.seconds + min(spare, work.spare)
        signal.setitimer(signal.ITIMER_PROF, limit)
        problems = matchers.fill(work.rows)
        left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        spare = max(0.0, min(SPARE_SECONDS, spare + work.seconds - (limit - left)))
        for problem in {*problems.values()}:
            masks = [index for index, each in problems.items() if each == problem]
            answers.send(_encode(MaskAnswer(work.step, masks, problem)))
    return work


def _receive(connection: socket.socket, decoder: msgspec.msgpack.Decoder[MaskWork | str]) -> MaskWork | str:
    """A `Connection` would read twice, and has more to run in each process. Raises EOFError."""
    received = b""
    while part := connection.recv(RECEIVED_BYTES):
        received += part
        try:
            return decoder.decode(received)
        except msgspec.DecodeError:
            continue  # its end is yet to come
    raise EOFError


def _isolate(kept: set[int]) -> None:
    """Keep these descriptors alone: by one the manager sees that it exited. Leave no trace of a client's text."""
    edges = [2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for before, after in itertools.pairwise(edges):
        os.closerange(before + 1, after)
    os.close(2)  # llguidance's last words could hold a client's lines
    os.open(os.devnull, os.O_WRONLY)  # gets the lowest number, which is 2
    be_expendable()


def private_bytes(pid: int) -> int:
    """What RLIMIT_DATA bounds: private memory, written or not."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[5]) * resource.getpagesize()


def main() -> NoReturn:
    """Main function of the manager; its argument is a `ManagerSpec` as JSON."""
    ignore_stop_signals()
    spec = msgspec.json.decode(sys.argv[1], type=ManagerSpec)
    die_with_parent(spec.parent_pid)
    setproctitle(spec.title)
    vocabulary = MaskVocabulary(Path(spec.tokenizer), spec.masks, spec.rows)
    gc.freeze()  # what is loaded stays shared by all processes: the collector need not write to it
    with contextlib.suppress(EOFError):
        reports, answers = Connection(spec.reports, readable=False), socket.socket(fileno=spec.answers)
        Manager(vocabulary, Connection(spec.requests, writable=False), reports, answers).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
