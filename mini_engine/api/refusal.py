"""How a request that cannot be served ends: a line in the log if the server is at fault, and OpenAI's error."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping

from starlette.responses import Response

from mini_engine import metrics
from mini_engine.api.errors import ApiError, as_api_error, internal_error, overloaded
from mini_engine.api.timings import RequestClock
from mini_engine.log import about
from mini_engine.shortage import Shortage, shortage_in

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0  # without a refusal after which the next one begins another shortage
REMEDIES = {
    "open files": "raise its limit: ulimit -n, LimitNOFILE=, --ulimit nofile=",
    "threads": "raise the limit on processes: ulimit -u, TasksMax=, --pids-limit",
    "memory": "docs/operations.md says what takes it",
}

_refused_at: dict[str, float] = {}  # by what there was too little of


def explain(error: Exception, request_id: str, clock: RequestClock) -> ApiError:
    """What the client is told of `error`. One that is nobody's fault but the server's goes to the log."""
    shortage = shortage_in(error)
    answer = as_api_error(error) if shortage is None else refuse_for(shortage)
    if answer is None:
        logger.error("%s failed", request_id, exc_info=error, extra=about(request_id))
        answer = internal_error(request_id)
    logger.debug("%s refused: %d %s", request_id, answer.status, answer.body.code, extra=about(request_id))
    clock.failed = True
    if answer.status >= 500:
        clock.end("error")
    return answer


def refuse_for(shortage: Shortage) -> ApiError:
    """The refusal of a request for which the host has too little of something. It is counted, and the log has a line
    where that begins: a host that is short of something is to write no more than it has to.
    """
    now, before = time.monotonic(), _refused_at.get(shortage.what)
    _refused_at[shortage.what] = now
    if before is None or now - before > QUIET_SECONDS:
        what = shortage.what
        logger.error("this process gets no more %s, and refuses requests for that: %s", what, REMEDIES[what])
    metrics.requests_rejected_total.labels("host").inc()
    return overloaded(str(shortage))


def error_response(
    error: ApiError, request_id: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """`error` as a response. A request that has no id yet is given one, by which its client can ask about it."""
    named = {"x-request-id": request_id or f"req-{uuid.uuid4().hex}"}
    return Response(error.encode(), error.status, {**error.headers, **named, **(headers or {})}, "application/json")
