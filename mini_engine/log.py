"""Logging: the standard library's, one format for the lines of all processes, with the name that `ps` shows for each.

A record becomes a line in a bounded queue, and a thread writes the lines to stderr: a stderr that is slow, full or
closed delays neither an event loop nor a step of an engine. Lines that it does not take are dropped and counted.
"""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

QUEUE_LINES = 1000
FLUSH_SECONDS = 1.0  # that the end of a process waits for the queue, at most


class JsonFormatter(logging.Formatter):
    """A JSON object per line: `time` (RFC 3339, UTC), `level`, `process`, `logger`, `message`, what `about` says, and
    where there is one `exception`."""

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """`HH:MM:SS LEVEL process | text`, and behind it the `caller` of `about`."""

    def __init__(self, process: str):
        super().__init__(f"%(asctime)s %(levelname)-7s {process} | %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        caller = ", ".join(f"{name} {value}" for name, value in getattr(record, "caller", {}).items())
        return super().formatMessage(record) + (caller and f" ({caller})")


def about(request_id: str, caller: Mapping[str, Any] = {}, **facts: Any) -> dict[str, Any]:
    """The `extra` of a line about one request: the fields of its JSON object. The text of the line names the id and the
    `facts`, too, but not the `caller`: see `http/access.py`."""
    return {"caller": caller, "facts": {"request_id": request_id, **caller, **facts}}


class LineQueue(logging.Handler):
    """Queues records as lines of text. A thread, which ends with the process, writes them to the descriptor `fd`."""

    def __init__(self, fd: int = 2):
        super().__init__()
        self.lines: queue.Queue[bytes] = queue.Queue(QUEUE_LINES)
        self.dropped = 0  # lines that found the queue full
        threading.Thread(target=self._write_lines, args=(fd,), daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.lines.put_nowait(self.format(record).encode(errors="replace") + b"\n")
        except queue.Full:
            self.dropped += 1
        except Exception:  # noqa: BLE001 - as all handlers
            self.handleError(record)

    def flush(self) -> None:
        """Wait until the lines are written, but not for a stderr that takes none; `logging.shutdown` calls this."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while self.lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def _write_lines(self, fd: int) -> None:
        failed = reported = 0
        while True:
            line, missing = self.lines.get(), self.dropped + failed
            if missing > reported:
                line = b"(%d lines of the log could not be written here)\n" % (missing - reported) + line
            try:
                os.write(fd, line)
                reported = missing
            except OSError:
                failed += 1
            self.lines.task_done()


def setup(process: str, level: str, line_format: str) -> None:
    """Send this process's log to stderr, as text or JSON. `process` is e.g. `worker 0.1`; the rest are `--log-level`
    and `--log-format`."""
    handler = LineQueue()
    handler.setFormatter((JsonFormatter if line_format == "json" else TextFormatter)(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "httpx", "httpcore", "urllib3", "filelock", "PIL"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
