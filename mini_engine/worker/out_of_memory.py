"""What is said when a device has no room for something: one line with a remedy, in the place of a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mini_engine.config import ConfigError

# CUDA's own words, and those of cuBLAS and NCCL, in errors that torch passes on as they are.
_SIGNS = ("out of memory", "ALLOC_FAILED")


@contextlib.contextmanager
def room_for(what: str, remedy: str, device: torch.device) -> Iterator[None]:
    """Around what takes memory of the device.

    Raises:
        ConfigError: there is none left; the text names `what`, and then `remedy`.
    """
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise ConfigError(f"{device} has no room for {what}; {remedy}") from None


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or one during whose handling it was raised, says that a device's memory has run out.

    A recording that runs out is left with a second error, which says only that it was not completed.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False
