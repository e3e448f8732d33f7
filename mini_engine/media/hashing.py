"""Media hashes: equal hashes of two items of one modality mean equal patches for one model.

A hash covers the item's bytes as fetched and, by its key, all that decides what becomes of them, and the request's
`cache_salt`: so whatever goes by the hash is shared within one salt. What a client says of an item (`uuid`) does not
enter: a client could name another client's media. Knows nothing of caches.
"""

import hashlib

HASH_BYTES = 16


def media_hash(data: bytes, key: bytes) -> bytes:
    """BLAKE2b of `data` under `key` (RFC 7693), HASH_BYTES long: a second for a gigabyte, without the GIL."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES, key=key).digest()
