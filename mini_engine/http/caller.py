"""Who sent a request, in the words of its log lines: fields of their JSON objects, and the end of their texts."""

import re
from typing import Any

from starlette.datastructures import Headers

ID_CHARACTERS = 128  # of a client's request id; more are cut off
TRACE_PARENT = re.compile(r"(?!ff)[\da-f]{2}-(?!0{32})([\da-f]{32})-(?!0{16})[\da-f]{16}-[\da-f]{2}(-.*)?")


def caller_of(headers: Headers, address: tuple[str, int] | None) -> dict[str, Any]:
    """`client` is the `address`, which a Unix socket does not have; `x_request_id` and `trace_id` are those of the
    headers X-Request-Id and traceparent (W3C Trace Context, section 3.2), if there are valid ones."""
    trace = TRACE_PARENT.fullmatch(headers.get("traceparent", ""))
    fields = {
        "client": _visible(address[0] if address else ""),  # a proxy may send anything
        "x_request_id": _visible(headers.get("x-request-id", "")),
        "trace_id": trace[1] if trace else "",
    }
    return {name: text for name, text in fields.items() if text}


def _visible(text: str) -> str:
    """Without spaces and what else could look like another field or line."""
    return re.sub(r"[^!-~]", "", text)[:ID_CHARACTERS]
