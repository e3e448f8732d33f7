"""Errors of the media path. Their texts go to clients: none holds a path, an address or bytes of an item."""


class ItemError(Exception):
    """One media item failed. The text names the item, the problem and the remedy; and of a limit its flag."""

    def __init__(self, item: str, problem: str) -> None:
        super().__init__(f"{item}: {problem}")
        self.item = item
        self.problem = problem


class MediaError(ItemError, ValueError):
    """The item cannot be used and the client has to send another: a 400."""


class DecoderUnavailable(ItemError):
    """The server could not decode the item now, through no fault of the item: a 503."""
