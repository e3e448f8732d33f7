"""An exception becomes OpenAI's error and a line in the log."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.responses import Response

from mini_engine import metrics
from mini_engine.api.errors import ApiError, as_api_error, internal_error, overloaded
from mini_engine.api.timings import RequestClock
from mini_engine.log import about
from mini_engine.shortage import Shortage, shortage_in

logger = logging.getLogger(__name__)

LINES_A_SECOND = 10  # on refused requests: their clients could fill the disk
REASON_CHARACTERS = 300
QUIET_SECONDS = 60.0  # without a shortage after which the next one is logged again
REMEDIES = {
    "open files": "raise its limit: ulimit -n, LimitNOFILE=, --ulimit nofile=",
    "threads": "raise the limit on processes: ulimit -u, TasksMax=, --pids-limit",
    "memory": "docs/operations.md says what takes it",
}

_short_at: dict[str, float] = {}  # when, by what there was too little of


class RefusalLog:
    """A line in the log for each refused request, `LINES_A_SECOND` at most, and the number of those left out."""

    def __init__(self) -> None:
        self._until = 0.0  # the end of a second
        self._refused = 0  # in that second
        self._left_out = 0

    def add(self, error: ApiError, request_id: str) -> None:
        """Log one, with the error's own message in one line of printable characters. Runs in an event loop."""
        now = time.monotonic()
        if now >= self._until:
            self._until, self._refused = now + 1, 0
        self._refused += 1
        if self._refused > LINES_A_SECOND:
            self._left_out += 1
            if self._refused == LINES_A_SECOND + 1:
                asyncio.get_running_loop().call_later(1.0, self._log_left_out)
            return
        message = error.body.message
        reason = "".join(one if one.isprintable() else " " for one in message[:REASON_CHARACTERS])
        cut = "…" if len(message) > REASON_CHARACTERS else ""
        what = "refused" if error.status < 500 or error.status == 503 else "failed"
        text = f"{request_id} {what}: {error.status} {error.body.code}: {reason}{cut}"
        logger.info("%s", text, extra=about(request_id))

    def _log_left_out(self) -> None:
        logger.info("%d more requests were refused, at most %d a second are listed", self._left_out, LINES_A_SECOND)
        self._left_out = 0


refusals = RefusalLog()


def explain(error: Exception, request_id: str, clock: RequestClock | None) -> ApiError:
    """The response to `error`, which is logged; with the `clock` of a request for text it is counted."""
    shortage = shortage_in(error)
    answer = as_api_error(error) if shortage is None else refuse_for(shortage)
    if answer is None:
        logger.error("%s failed", request_id, exc_info=error, extra=about(request_id))
        answer = internal_error(request_id)
    else:
        refusals.add(answer, request_id)
    if clock is not None:
        clock.failed = True
        if answer.status >= 500:
            clock.end("error")
    return answer


def refuse_for(shortage: Shortage) -> ApiError:
    """The response to a request for which the host has too little of something. It is counted."""
    log_shortage(shortage)
    metrics.requests_rejected_total.labels("host").inc()
    return overloaded(str(shortage))


def log_shortage(shortage: Shortage) -> None:
    """One line when a shortage begins: a host that is short of something should write no more than it has to."""
    what, now = shortage.what, time.monotonic()
    before, _short_at[what] = _short_at.get(what), now
    if before is None or now - before > QUIET_SECONDS:
        logger.error("this process gets no more %s, and refuses requests for that: %s", what, REMEDIES[what])


def error_response(error: ApiError) -> Response:
    """`error` as a response."""
    return Response(error.encode(), error.status, dict(error.headers), "application/json")
