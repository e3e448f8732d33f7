"""Files of requests and of answers in OpenAI's batch format, one JSON object per line. A line of the answers is written
when its answer arrives, so the order is another.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from mini_engine.batch.row_file import RowFile
from mini_engine.batch.server_handle import Reply
from mini_engine.config import ConfigError

ERROR_CHARACTERS = 200  # of an error's first line
AGAIN = (0, 401, 403, 429, 500, 502, 503, 504)  # the request was not the cause, 0: no response


class BatchRequest(msgspec.Struct, frozen=True):
    """A line of the requests. `body` is as the endpoint takes it, without `stream`."""

    custom_id: str
    url: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score"
    ]  # fmt: skip
    body: dict[str, Any]
    method: Literal["POST"] = "POST"

    def __post_init__(self) -> None:
        if self.body.get("stream"):
            raise ValueError("a batch has no 'stream'")


def answer_row(custom_id: str, reply: Reply) -> dict[str, Any]:
    """A line of the answers: a response of any status, or an error if there was none."""
    number = f"batch_req_{os.urandom(12).hex()}"
    if not reply.status:
        error = {"code": "no_response", "message": reply.error}
        return {"id": number, "custom_id": custom_id, "response": None, "error": error}
    response = {"status_code": reply.status, "request_id": str(reply.body.get("id", number)), "body": reply.body}
    return {"id": number, "custom_id": custom_id, "response": response, "error": None}


def status_of(row: Mapping[str, Any]) -> int:
    """Of an answer's response; 0 without one."""
    return row["response"]["status_code"] if row["response"] else 0


def failure_of(row: Mapping[str, Any]) -> str | None:
    """The status of an answer, and how its error begins; None if it is 200."""
    status = status_of(row)
    error = Reply(status, dict(row["response"]["body"] if status else row)).error
    if error is None:
        return None
    return f"{f'status {status}: ' if status else ''}{error.partition(chr(10))[0][:ERROR_CHARACTERS]}"


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file in their order, read as they are iterated. Raises ConfigError: no such file, or a line
    that is no request."""
    if not path.is_file():
        raise ConfigError(f"{path}: no regular file, which can be read twice")
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


class AnswerFile(RowFile):
    """The answers of a file. Those of statuses in AGAIN and those without a response are asked for again, with
    `retry_failed` all but 200. Raises as `RowFile`."""

    def __init__(self, path: Path, retry_failed: bool):
        self.done = set[str]()  # the ids of the answers that it has
        self.failed = 0  # of these, such as have another status than 200
        self.failures = Counter[str]()  # the same, by `failure_of`
        super().__init__(path, b'{"id":"batch_req_', lambda row: self._count(row, retry_failed))

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a line. Raises OSError."""
        self._count_failure(row)
        super().append(row)

    def _count_failure(self, row: Mapping[str, Any]) -> None:
        if failure := failure_of(row):
            self.failed += 1
            self.failures[failure] += 1

    def _count(self, row: Mapping[str, Any], retry_failed: bool) -> bool:
        status, custom_id = status_of(row), row["custom_id"]
        is_kept = status == 200 or not (retry_failed or status in AGAIN)
        if is_kept:
            self.done.add(custom_id)
            self._count_failure(row)
        return is_kept
