"""A process that is out of file descriptors, while a block runs."""

import contextlib
import resource
from collections.abc import Iterator

STANDARD = 3  # descriptors that stay open: input, output, errors


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Each further one is EMFILE, even if one that is open is closed meanwhile, as by the garbage collector."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
