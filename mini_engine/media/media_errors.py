"""Errors of the media path. Their texts go to clients: none holds a path, an address or bytes of an item."""

from mini_engine.protocol.api_errors import ApiError, Code


class ItemError(ApiError):
    """One media item failed. The text names the item, the problem and the remedy; and of a limit its flag."""

    def __init__(self, item: str, problem: str, status: int = 503, code: Code = "overloaded", param: str | None = None):
        super().__init__(status, f"{item}: {problem}", code=code, param=param)
        self.item, self.problem = item, problem


class MediaError(ItemError):
    """The item cannot be used and the client has to send another."""

    def __init__(self, item: str, problem: str) -> None:
        super().__init__(item, problem, 400, "invalid_media", "messages")


class DecoderUnavailable(ItemError):
    """The server could not decode the item now, through no fault of the item."""
