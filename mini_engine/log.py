"""Logging: one format for the lines of all processes, with the name that `ps` shows for each."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import select
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """What every process of a server logs, and how."""

    level: str  # the least severe that is shown
    format: LogFormat = "text"


class JsonFormatter(logging.Formatter):
    """Each line an object: `time` (RFC 3339, UTC), `level`, `process`, `logger`, `message`, and where there is one
    `request_id`, `exception`.
    """

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := getattr(record, "request_id", None)) is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def about(request_id: str) -> dict[str, str]:
    """The `extra` of a line about one request, whose id the line names, too."""
    return {"request_id": request_id}


class Output:
    """This process's stderr, which may be full, closed or gone. Writing to it never waits and never fails.

    What it does not take is dropped, and their number stands before the next lines that it takes. So nobody dies or
    hangs with a full disk, a reader that reads no more, or a stopped supervisor. For one thread at a time.
    """

    def __init__(self, fd: int = 2):
        self._fd = fd
        self._dropped = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, lines: bytes) -> None:
        """Write whole lines."""
        if self._dropped and self._takes(b"(%d lines of the log could not be written here)\n" % self._dropped):
            self._dropped = 0
        for start in range(0, len(lines), select.PIPE_BUF):  # so much a pipe that can be written to takes at once
            if self._dropped or not self._takes(lines[start : start + select.PIPE_BUF]):
                self._dropped += max(1, lines.count(b"\n", start))
                return

    def _takes(self, part: bytes) -> bool:
        try:
            return bool(self._poll.poll(0)) and os.write(self._fd, part) == len(part)
        except OSError:
            return False


output = Output()


class OutputHandler(logging.Handler):
    """Logs to `output`."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            output.write(self.format(record).encode(errors="replace") + b"\n")
        except Exception:  # noqa: BLE001 - a record that cannot be formatted ends nobody's work
            self.handleError(record)


def setup(process: str, settings: LogSettings) -> None:
    """Send this process's log to stderr, as `HH:MM:SS LEVEL process | text` or JSON. `process` is e.g. `worker 0.1`."""
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {process} | %(message)s", datefmt="%H:%M:%S")
    handler = OutputHandler()
    handler.setFormatter(JsonFormatter(process) if settings.format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for chatty in ("asyncio", "httpx", "httpcore", "urllib3", "filelock", "PIL"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
