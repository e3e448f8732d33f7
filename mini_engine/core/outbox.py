"""What an engine core has to tell API servers at the end of a turn, gathered by peer: one message of a kind to each."""

from __future__ import annotations

from mini_engine.core.links import Links
from mini_engine.messages import Accepted, Consumed, MessageId, Outputs, RequestOutput


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

    def send(self) -> None:
        """Tell everybody everything."""
        for peer, request_ids in self._accepted.items():
            self._links.send(peer, Accepted(request_ids))
        for peer, outputs in self._outputs.items():
            self._links.send(peer, Outputs(outputs))
        for peer, messages in self._consumed.items():
            self._links.send(peer, Consumed(messages))
        self._accepted, self._outputs, self._consumed = {}, {}, {}
