"""Errors of the media road, each with a text that may be shown to the client.

Knows nothing of HTTP: the API server turns a `MediaError` into a 400.
"""


class MediaError(ValueError):
    """A media item that cannot be used, through no fault of the server.

    The text names the item, what is wrong and the remedy. It never holds a path, an address or bytes of the item.
    `limit` is the name of the limit that was exceeded, as a field of `MediaPolicy`, `DecodeLimits` or `ImageLimits`;
    the flag that sets it has the same name.
    """

    def __init__(self, item: str, problem: str, *, limit: str | None = None) -> None:
        super().__init__(f"{item}: {problem}")
        self.item = item
        self.limit = limit


class DecodeCancelled(Exception):
    """A decode was given up because its request is gone. Nobody is left to be told."""


class FetchCancelled(Exception):
    """A fetch was given up because its request is gone. Nobody is left to be told."""
