"""Content digests, under media hashes: equal hashes of two items of one modality mean equal patches for one model.

A digest covers the bytes of an item as fetched, which takes a second for a gigabyte. A hash covers a digest and, by its
key, all that decides what becomes of the bytes, and the request's `cache_salt`: so other settings cost no second
reading, and whatever goes by the hash is shared within one salt. What a client says of an item (`uuid`) does not enter:
a client could name another client's media. A name has a key of its own, for a digest. Knows nothing of caches.
"""

import hashlib
from collections.abc import Sequence

import msgspec

HASH_BYTES = 16


def content_digest(data: bytes, frame_sizes: Sequence[int] = ()) -> bytes:
    """BLAKE2b (RFC 7693), HASH_BYTES long, of the bytes of a file, or of frames one after another with their sizes.
    Holds no GIL."""
    sizes = b"".join(size.to_bytes(8, "little") for size in frame_sizes)
    key = hashlib.blake2b(sizes, digest_size=32).digest() if sizes else b""
    return hashlib.blake2b(data, digest_size=HASH_BYTES, key=key).digest()


def name_key(uuid: str, modality: str, cache_salt: str | None, client: bytes) -> bytes:
    """HASH_BYTES that all names of a client have in common, and HASH_BYTES for its name of an item. `client` is a hash
    of its API key; empty where none is needed."""
    parts = msgspec.msgpack.encode([cache_salt, client]), msgspec.msgpack.encode([uuid, modality])
    return b"".join(hashlib.blake2b(part, digest_size=HASH_BYTES, person=b"name").digest() for part in parts)
