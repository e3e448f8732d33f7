"""Media hashes: equal hashes of two items of one modality mean equal patches for one model.

A hash covers the item's bytes as fetched and all that decides what becomes of them. What a client says of an item
(`uuid`) does not enter: a client could name another client's media. Knows nothing of caches.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mini_engine.media.sampling import VideoSampling

HASH_BYTES = 16


def settings_key(
    modality: str, sampling: VideoSampling | None, processor_kwargs: Mapping[str, Any], model: tuple[str, str | None]
) -> bytes:
    """The key for `media_hash`: everything that a hash covers but the bytes.

    `sampling` is None for images, `processor_kwargs` are JSON values, and `model` is directory and revision, or any
    pair that differs for other weights or processor files.
    """
    # JSON separates the parts: no two different lists have the same text.
    settings = json.dumps([modality, repr(sampling), processor_kwargs, *model], sort_keys=True)
    return hashlib.blake2b(settings.encode(), digest_size=32).digest()


def media_hash(data: bytes, key: bytes) -> bytes:
    """BLAKE2b of `data` under `key` (RFC 7693), HASH_BYTES long: a second for a gigabyte, without the GIL."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES, key=key).digest()
