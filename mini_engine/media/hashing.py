"""Media hashes: what makes two items of one modality the same patches for one model.

A hash covers the item's bytes as they were fetched and all that decides what becomes of them: how a video is sampled,
the processor's settings and the model. What a client says of an item (`uuid`) is no part of it, since a client could
name another's media. Knows nothing of caches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from mini_engine.media.sampling import VideoSampling

HASH_BYTES = 16
KEY_BYTES = 32


def settings_key(
    modality: Literal["image", "video"],
    sampling: VideoSampling | None,
    processor_kwargs: Mapping[str, Any],
    model: tuple[str, str | None],
) -> bytes:
    """Everything that a hash covers but the bytes, as a key for `media_hash`. Made at start, and for each request
    with settings of its own.

    Args:
        sampling: how videos are sampled; None for images.
        processor_kwargs: `--mm-processor-kwargs`, JSON values.
        model: directory and revision, or any other pair that is another for other weights or processor files.
    """
    # JSON keeps the parts apart: no two different lists are written alike.
    settings = json.dumps([modality, repr(sampling), processor_kwargs, *model], sort_keys=True)
    return hashlib.blake2b(settings.encode(), digest_size=KEY_BYTES).digest()


def media_hash(data: bytes, key: bytes) -> bytes:
    """The hash of an item, 16 bytes: BLAKE2b of `data` under `key` (RFC 7693), which `settings_key` made.

    About a second for a gigabyte, without the interpreter's lock: for a media thread.
    """
    return hashlib.blake2b(data, digest_size=HASH_BYTES, key=key).digest()
