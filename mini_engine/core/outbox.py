"""What an engine core has to tell API servers at the end of a turn, gathered by peer: one message of a kind to each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mini_engine.core.directory import Directory
from mini_engine.core.links import Links
from mini_engine.messages import (
    Accepted,
    Cached,
    Consumed,
    Evicted,
    LastUsed,
    MessageId,
    Outputs,
    RequestOutput,
    StoreObject,
    Unwanted,
)


class Outbox:
    """Peers are addresses on the ROUTER for API servers."""

    def __init__(self, links: Links):
        self._links = links
        self._outputs: dict[bytes, list[RequestOutput]] = {}
        self._consumed: dict[bytes, list[MessageId]] = {}
        self._accepted: dict[bytes, list[str]] = {}

    def output(self, peer: bytes, output: RequestOutput) -> None:
        """Tokens, or the end, of a request."""
        self._outputs.setdefault(peer, []).append(output)

    def consumed(self, message: MessageId) -> None:
        """No rank will read it again; its sender is told if it lives."""
        peer = self._links.identities.get(message.incarnation)
        if peer is not None:
            self._consumed.setdefault(peer, []).append(message)

    def accepted(self, peer: bytes, request_id: str) -> None:
        """A request has all its media."""
        self._accepted.setdefault(peer, []).append(request_id)

    def forget(self, peer: bytes) -> None:
        """A peer is dead."""
        for waiting in (self._outputs, self._consumed, self._accepted):
            waiting.pop(peer, None)

    def send(self, media: Directory[Any]) -> None:
        """Tell everybody everything."""
        for peer, request_ids in self._accepted.items():
            self._links.send(peer, Accepted(request_ids))
        for peer, outputs in self._outputs.items():
            self._links.send(peer, Outputs(outputs))
        for peer, messages in self._consumed.items():
            self._links.send(peer, Consumed(messages))
        self._accepted, self._outputs, self._consumed = {}, {}, {}
        self._send_directory(media)

    def _send_directory(self, media: Directory[Any]) -> None:
        """What the copies of the directory lack, and what owners of objects should know."""
        for peer in self._links.identities.values():
            if media.unlisted:
                self._links.send(peer, Evicted(list(media.unlisted)))
            if media.listed:
                self._links.send(peer, Cached(list(media.listed.values())))
        media.unlisted, media.listed = {}, {}
        for kind, objects in ((LastUsed, media.used), (Unwanted, media.unwanted)):
            for incarnation, numbers in _by_owner(objects).items():
                if (owner := self._links.identities.get(incarnation)) is not None:
                    self._links.send(owner, kind(numbers))
        media.used, media.unwanted = {}, {}


def _by_owner(objects: Iterable[StoreObject]) -> dict[int, list[int]]:
    numbers: dict[int, list[int]] = {}
    for key in objects:
        numbers.setdefault(key.incarnation, []).append(key.number)
    return numbers
