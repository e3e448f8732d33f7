"""Between an API server and the engine core that keeps what a name of an image or video means."""

import msgspec

from mini_engine.messages.tensors import Message


class NamedMedia(msgspec.Struct, frozen=True, array_like=True):
    """What a name means: see `core/caches/media_names.py`."""

    digest: bytes  # of the content; for a name that means nothing one that no content has
    url: bytes = b""  # hash of the `http(s)://` URL that the content was downloaded from
    is_frames: bool = False  # a video that was sent as its frames


class ResolveNames(Message, frozen=True):
    """API server -> core: what do names with these keys mean?"""

    request_id: str
    keys: list[bytes]


class NamesResolved(Message, frozen=True):
    """Core -> API server: answer to `ResolveNames`, of those that mean something, by key."""

    request_id: str
    named: dict[bytes, NamedMedia]


class BindName(Message, frozen=True):
    """API server -> core: the name with this key means this from now on."""

    key: bytes
    media: NamedMedia
