"""Which host a request prefers: rendezvous hashing of its media key over hosts, with bounded load.

Each key orders all hosts; the order among the hosts that stay does not change when others come or go. So a host that
leaves moves only its own keys, and one that joins takes a fair part of each other's (Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", 1998). The bound on load follows Mirrokni, Thorup and Zadimoghaddam,
"Consistent hashing with bounded loads", 2018. Knows nothing of Ray.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping

LOAD_FACTOR = 1.25  # of the mean load, which a host may have and still be preferred
LOAD_MARGIN = 4  # requests above that: with few in flight the mean says little, and a spilled video decodes twice


def preference(key: str, hosts: Iterable[str]) -> list[str]:
    """The hosts in the order of this key."""
    return sorted(hosts, key=lambda host: hashlib.blake2b(f"{key} {host}".encode(), digest_size=8).digest())


def ranked(key: str, loads: Mapping[str, int], avoided: Collection[str] = ()) -> list[str]:
    """All hosts, best first: in the order of `key`, but those above the bound later, and those to avoid last.

    Args:
        loads: requests in flight of each host.
    """
    bound = LOAD_FACTOR * sum(loads.values()) / max(1, len(loads)) + LOAD_MARGIN
    return sorted(preference(key, loads), key=lambda host: (host in avoided, loads[host] >= bound))
