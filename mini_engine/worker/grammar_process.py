"""The processes that compile and follow grammars: a manager beside rank 0, and one for each grammar.

    rank 0  <-- requests, problems; reports -->  manager  -- fork -->  one process per grammar
                                                 (tokenizer)            compiles; fills masks in shared memory

A few lines of a grammar can take hours or all memory, which no setting of llguidance prevents. So whatever a grammar
takes is its own process's, and timers and limits of the kernel end what takes too much, without a question of which
grammar is at fault. The manager runs nothing of a grammar and starts no thread, so it always answers in time.
`grammar.py` is rank 0's end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import signal
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

from mini_engine.messages import Grammar, GrammarReady
from mini_engine.process_setup import die_with_parent
from mini_engine.worker.matchers import PROBLEM, Matchers, Row, Vocabulary

COMPILE_SECONDS = 1  # of processor time, with the first mask
COMPILING = 2  # grammars at once, of different clients; others are queued
# Of private memory, beyond what the manager has: a schema of 100,000 characters takes 50 MB, and 64 outputs 20 MB more.
MEMORY_BYTES = 128 << 20
# Of processor time for the masks of a step: each process has its share of `MASK_SECONDS`, but `LEAST_SECONDS`, and
# `ROW_SECONDS` for each row, which few masks take. Of wall time, since a busy machine is no fault of a grammar, more.
MASK_SECONDS, LEAST_SECONDS, ROW_SECONDS, STALLED_SECONDS = 0.1, 0.01, 0.003, 1.0
REFUSED_SECONDS, REFUSED = 600, 1000  # for how long, and how many grammars whose processes were killed

SLOW_COMPILE = PROBLEM.format(f"takes more than {COMPILE_SECONDS} s to compile")
SLOW_MASK = PROBLEM.format(f"takes more than {MASK_SECONDS * 1000:.0f} ms for a token")
CRASHED = PROBLEM.format(f"takes more than {MEMORY_BYTES >> 20} MiB of memory, or its process was killed")


class ManagerSpec(msgspec.Struct, frozen=True):
    """Arguments of the manager."""

    parent_pid: int
    title: str  # of the process
    tokenizer: str  # path
    rows: int  # at most in a step; and grammars of a client in use at once; of all clients twice as many
    requests: int  # descriptors
    reports: int
    masks: int


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0 -> manager. Each of `grammars` is reported by a `GrammarReady`. If there are `rows`, the answer is a
    problem for each of them, a text for the client; where it is empty, the row's mask is there."""

    grammars: list[Grammar] = []
    unused: list[bytes] = []  # digests
    finished: list[tuple[bytes, str]] = []  # digests and outputs
    rows: list[Row] = []


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Manager -> a grammar's process, once that has reported by one problem, perhaps empty, that it is compiled. The
    answer is a problem for each row."""

    finished: list[str] = []  # outputs
    rows: list[tuple[int, Row]] = []  # with the places of their masks
    seconds: float = 0.0  # of processor time for the masks


_problems = msgspec.msgpack.Decoder(list[str])


class _Process:
    """The process of a grammar, as the manager sees it."""

    def __init__(self, pid: int, connection: Connection, client: bytes) -> None:
        self.pid, self.connection, self.client = pid, connection, client
        self.is_compiled = False
        self.places: list[int] = []  # of the step's rows, until it has answered


class Manager:
    """Starts, asks and kills the processes of grammars. Owns both connections."""

    def __init__(self, vocabulary: Vocabulary, requests: Connection, reports: Connection) -> None:
        self._vocabulary, self._requests, self._reports = vocabulary, requests, reports
        self._processes: dict[bytes, _Process] = {}  # by digest
        self._queue: list[Grammar] = []
        self._refused: dict[bytes, tuple[float, str]] = {}  # until when, and why
        self._problems: list[str] = []  # of the step's rows
        self._busy: set[bytes] = set()  # those whose processes have not answered in this step
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, self._take_request)

    def serve(self) -> None:
        """Until rank 0 closes its connection: raises EOFError."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map():  # not ended meanwhile
                    key.data()
            self._start_queued()

    def _take_request(self) -> None:
        request = msgspec.msgpack.decode(self._requests.recv_bytes(), type=Request)
        for digest in request.unused:
            if digest in self._processes:  # else it was killed
                self._end(digest)
        for grammar in request.grammars:
            if problem := self._refusal(grammar.digest):
                self._report(grammar.digest, problem)
            else:
                self._queue.append(grammar)
        if request.rows or request.finished:
            self._send_work(request)

    def _send_work(self, request: Request) -> None:
        self._problems = [CRASHED] * len(request.rows)
        finished, rows = defaultdict[bytes, list[str]](list), defaultdict[bytes, list[tuple[int, Row]]](list)
        for digest, request_id in request.finished:
            finished[digest].append(request_id)
        for place, row in enumerate(request.rows):
            rows[row.digest].append((place, row))
        share = max(LEAST_SECONDS, MASK_SECONDS / max(1, len(rows)))
        for digest in {*finished, *rows}:
            places, process = [place for place, _ in rows[digest]], self._processes.get(digest)
            if process is None:
                for place in places:
                    self._problems[place] = self._refusal(digest) or CRASHED
                continue
            if places:
                process.places = places
                self._busy.add(digest)
            work = Work(finished[digest], rows[digest], share + ROW_SECONDS * len(places))
            with contextlib.suppress(ConnectionError):  # it was killed, as the selector shows next
                process.connection.send_bytes(msgspec.msgpack.encode(work))
        if request.rows:
            self._answer()

    def _take_problems(self, digest: bytes, process: _Process) -> None:
        try:
            problems = _problems.decode(process.connection.recv_bytes())
        except (EOFError, OSError):
            self._lose(digest, process)
            return
        if process.is_compiled:
            self._busy.remove(digest)
            for place, problem in zip(process.places, problems, strict=True):
                self._problems[place] = problem
            self._answer()
            return
        process.is_compiled = True
        self._report(digest, problems[0])
        if problems[0]:
            self._end(digest)

    def _answer(self) -> None:
        """Once the masks of the step are there."""
        if not self._busy:
            self._requests.send_bytes(msgspec.msgpack.encode(self._problems))

    def _lose(self, digest: bytes, process: _Process) -> None:
        """A process closed its connection: it has exceeded a limit."""
        problem = CRASHED
        if os.WTERMSIG(self._end(digest)) in (signal.SIGPROF, signal.SIGALRM):
            problem = SLOW_MASK if process.is_compiled else SLOW_COMPILE
        if len(self._refused) == REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[digest] = time.monotonic() + REFUSED_SECONDS, problem
        if not process.is_compiled:
            self._report(digest, problem)
        if digest in self._busy:
            self._busy.remove(digest)
            for place in process.places:
                self._problems[place] = problem
            self._answer()

    def _refusal(self, digest: bytes) -> str:
        """Why a grammar is refused; empty: it is not."""
        until, problem = self._refused.get(digest, (0.0, ""))
        if time.monotonic() < until:
            return problem
        self._refused.pop(digest, None)
        return ""

    def _report(self, digest: bytes, problem: str) -> None:
        self._reports.send_bytes(msgspec.msgpack.encode(GrammarReady(digest, problem)))

    def _start_queued(self) -> None:
        """Of a client one grammar at a time is compiled, and `rows` are in use: so no client takes all places."""
        compiling = {process.client for process in self._processes.values() if not process.is_compiled}
        used = Counter(process.client for process in self._processes.values())
        for grammar in self._queue.copy():
            if len(compiling) == COMPILING or len(self._processes) >= 2 * self._vocabulary.rows:
                return
            if grammar.client not in compiling and used[grammar.client] < self._vocabulary.rows:
                self._queue.remove(grammar)
                self._start(grammar)
                compiling.add(grammar.client)
                used[grammar.client] += 1

    def _start(self, grammar: Grammar) -> None:
        manager, digest = os.getpid(), grammar.digest
        try:
            ours, theirs = Pipe()
            pid = os.fork()
        except OSError as error:
            self._report(digest, f"The grammar of this request gets no process: {error.strerror}; retry later.")
            return
        if pid == 0:
            try:
                _follow(self._vocabulary, grammar.text, theirs, manager)
            finally:
                os._exit(1)  # whatever happened: the manager's code ends here
        theirs.close()
        self._processes[digest] = process = _Process(pid, ours, grammar.client)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._take_problems, digest, process))

    def _end(self, digest: bytes) -> int:
        """Returns its exit status. It writes no mask from here on."""
        process = self._processes.pop(digest)
        os.kill(process.pid, signal.SIGKILL)
        _, status = os.waitpid(process.pid, 0)
        self._selector.unregister(process.connection)
        process.connection.close()
        return status


def _follow(vocabulary: Vocabulary, grammar: str, connection: Connection, manager: int) -> None:
    """What a grammar's process does, until it is killed."""
    die_with_parent(manager)
    setproctitle("mini-engine: grammar")
    _limit(connection.fileno())
    _set_timers(COMPILE_SECONDS)
    matchers = Matchers(vocabulary, grammar)
    _set_timers()
    connection.send_bytes(msgspec.msgpack.encode([matchers.problem]))
    decoder = msgspec.msgpack.Decoder(Work)
    while True:
        work = decoder.decode(connection.recv_bytes())
        matchers.drop(work.finished)
        if work.rows:
            _set_timers(work.seconds, STALLED_SECONDS)
            problems = matchers.fill(work.rows)
            _set_timers()
            connection.send_bytes(msgspec.msgpack.encode(problems))


def _set_timers(processor_seconds: float = 0, wall_seconds: float = 0) -> None:
    """0: none. Python handles neither signal, so it ends the process, whatever that does."""
    signal.setitimer(signal.ITIMER_PROF, processor_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


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
    # Ctrl-C and a service manager's SIGTERM reach all processes: the supervisor acts on them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.argv[1], type=ManagerSpec)
    die_with_parent(spec.parent_pid)
    setproctitle(spec.title)
    vocabulary = Vocabulary(Path(spec.tokenizer), spec.masks, spec.rows)
    gc.freeze()  # what is loaded stays shared by all processes: the collector need not write to it
    with contextlib.suppress(EOFError):
        Manager(vocabulary, Connection(spec.requests), Connection(spec.reports, readable=False)).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
