"""The libraries that take seconds to import: the supervisor imports them once for all children (`child.py`)."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator

from mini_engine.messages import Role

# Each with what it imports. None of this package's modules: `metrics` depends on the process that imports it. None
# starts a thread that outlives a fork, opens a descriptor or looks for a device.
LIBRARIES: dict[Role, tuple[str, ...]] = {
    "core": (),
    "worker": ("torch",),
    "api": ("torch", "fastapi", "aiohttp", "torchvision", "transformers.models.auto.processing_auto"),
}


def preload(role: Role) -> Iterator[None]:
    """Import the libraries of `role` into this process, to be shared with the children that it starts from then on. One
    is imported at each step, which may take seconds; at once where all are imported already."""
    for name in LIBRARIES[role]:
        if name not in sys.modules:
            gc.disable()  # collections would take a quarter of the time
            with contextlib.suppress(Exception):  # it fails in the children, too, where the log names the role
                importlib.import_module(name)
            gc.freeze()  # a collector that walked the objects would copy their pages in each process
            gc.enable()
            yield
