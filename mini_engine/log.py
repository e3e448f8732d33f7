"""Logging: one format for the lines of all processes, with the name that `ps` shows for each."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
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


def setup(process: str, settings: LogSettings) -> None:
    """Send this process's log to stderr, as `HH:MM:SS LEVEL process | text` or JSON. `process` is e.g. `worker 0.1`."""
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {process} | %(message)s", datefmt="%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if settings.format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for chatty in ("asyncio", "httpx", "httpcore", "urllib3", "filelock", "PIL"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
