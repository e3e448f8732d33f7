"""What all messages share."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all that may stand in an `Envelope`. The tag on the wire is the class name."""
