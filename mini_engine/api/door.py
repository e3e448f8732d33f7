"""Who may come in: `--api-key`. Knows nothing of what is asked for inside."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from mini_engine.api.errors import ApiError
from mini_engine.api.refusal import error_response

OPEN_PATHS = ("/health", "/live")  # for those who only look whether the server is well
WRONG_KEY = "This server asks for an API key: send one that it knows in the header 'Authorization: Bearer KEY'."


class Door:
    """ASGI middleware: refuses with 401 who brings none of `api_keys`, but for `OPEN_PATHS`; without keys, nobody."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]):
        self._app = app
        self._known = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._known and scope["type"] == "http" and route_of(scope) not in OPEN_PATHS and not self._knows(scope):
            error = ApiError(401, WRONG_KEY, code="invalid_api_key")
            await error_response(error, headers={"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """Takes as long for a key that is nearly right as for any other, whichever of them it is."""
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                given = key.strip() if scheme.lower() == b"bearer" else b""
        digest = _digest(given)
        return any([hmac.compare_digest(digest, known) for known in self._known])


def route_of(scope: Scope) -> str:
    """The path below `--root-path`, whether a proxy has taken that away or not."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _digest(key: bytes) -> bytes:
    """As long for each key, so that the length of the right one does not show either."""
    return hashlib.sha256(key).digest()
