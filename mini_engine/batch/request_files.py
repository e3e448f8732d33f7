"""Files of requests and of answers in OpenAI's batch format, one JSON object per line.

A line of the answers is written when its answer arrives, so the order is another. A run that ends early, in whatever
way, leaves whole lines and at most one torn one; the next run goes on from there.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from mini_engine.batch.server_handle import Reply
from mini_engine.config import ConfigError

ROW_START = b'{"id":"batch_req_'
AGAIN = (0, 429, 500, 502, 503, 504)  # the request was not the cause, 0: no response


class BatchRequest(msgspec.Struct, frozen=True):
    """A line of the requests. `body` is as the endpoint takes it, without `stream`."""

    custom_id: str
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score"]
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


class BatchResponse(msgspec.Struct, frozen=True):
    """The response in a line of the answers."""

    status_code: int
    request_id: str
    body: dict[str, Any]


class BatchAnswer(msgspec.Struct, frozen=True):
    """A line of the answers: a response of any status, or an error if there was none."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: dict[str, Any] | None

    @classmethod
    def of(cls, custom_id: str, reply: Reply) -> "BatchAnswer":
        number = f"batch_req_{os.urandom(12).hex()}"
        if not reply.status:
            return cls(number, custom_id, None, {"code": "no_response", "message": reply.error})
        return cls(number, custom_id, BatchResponse(reply.status, str(reply.body.get("id", number)), reply.body), None)

    @property
    def status(self) -> int:
        """Of the response; 0 without one."""
        return self.response.status_code if self.response else 0


def refuse_special(path: Path) -> None:
    """Raises ConfigError: a device or pipe, which can be neither read twice nor replaced."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: not a regular file")


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file in their order, read as they are iterated. Raises ConfigError: no such file, or a line
    that is no request."""
    refuse_special(path)
    decoder = msgspec.json.Decoder(BatchRequest)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                request = decoder.decode(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            yield request


def ids_of(path: Path) -> set[str]:
    """The ids of the requests of a file. Raises ConfigError: as `read_requests`; an id occurs twice."""
    ids = set[str]()
    for request in read_requests(path):
        if request.custom_id in ids:
            raise ConfigError(f"{path}: custom_id {request.custom_id!r} occurs twice; answers are known by it")
        ids.add(request.custom_id)
    return ids


class AnswerFile:
    """The answers of a file, to which further ones are appended. One process at a time has it open.

    Answers that are to be repeated are removed when it is opened: those of statuses in AGAIN and those without a
    response, with `retry_failed` all but 200. So is a torn last line.

    Raises:
        ConfigError: the file cannot be written, another process appends to it, or a line is no answer.
    """

    def __init__(self, path: Path, retry_failed: bool):
        self.done = set[str]()  # the ids of the answers that it has
        self.failed = 0  # of these, such as have another status than 200
        refuse_special(path)
        path = path.resolve()  # a link stays one
        copy = path.with_name(path.name + ".tmp")
        try:
            with contextlib.ExitStack() as files:
                # It stays locked: a process that opens it before the copy takes its place must not append to it.
                old = files.enter_context(path.open("a+b"))
                fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
                old.seek(0)
                self._file = files.enter_context(copy.open("wb"))
                files.callback(copy.unlink, missing_ok=True)
                for number, line in enumerate(old, 1):
                    self._keep(line, f"{path}, line {number}", retry_failed)
                self._file.flush()
                os.fsync(self._file.fileno())
                os.fchmod(self._file.fileno(), os.fstat(old.fileno()).st_mode)
                fcntl.flock(self._file, fcntl.LOCK_EX)
                os.replace(copy, path)
                self.close = files.pop_all().close
        except BlockingIOError:
            raise ConfigError(f"{path}: another process appends to it") from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None

    def append(self, answer: BatchAnswer) -> None:
        """Write a line. Raises OSError."""
        self.failed += answer.status != 200
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()

    def _keep(self, line: bytes, place: str, retry_failed: bool) -> None:
        if not line.endswith(b"\n") and ROW_START.startswith(line[: len(ROW_START)]):
            return  # torn
        try:
            answer = msgspec.json.decode(line, type=BatchAnswer)
        except (ValueError, RecursionError):
            raise ConfigError(f"{place}: no answer of a batch; choose another file") from None
        if answer.status == 200 or not (retry_failed or answer.status in AGAIN):
            self.done.add(answer.custom_id)
            self.failed += answer.status != 200
            self._file.write(line.rstrip(b"\n") + b"\n")
