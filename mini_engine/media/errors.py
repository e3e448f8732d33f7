"""Errors of the media road, each with a text that may be shown to the client.

Knows nothing of HTTP: the API server turns a `MediaError` into a 400.
"""


class MediaError(ValueError):
    """A media item that cannot be used, through no fault of the server.

    The text names the item, what is wrong and the remedy. It never holds a path, an address or bytes of the item.
    Of a limit that was exceeded it names the flag.
    """

    def __init__(self, item: str, problem: str) -> None:
        super().__init__(f"{item}: {problem}")
        self.item = item


class DecodeCancelled(Exception):
    """A decode was given up because its request is gone. Nobody is left to be told."""


class FetchCancelled(Exception):
    """A fetch was given up because its request is gone. Nobody is left to be told."""
