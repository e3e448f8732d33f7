"""The libraries that take seconds to import: the supervisor imports them once for all children (`child.py`).

They import in turn what takes longer than they do and has no effect in a server: torch's compiler, and models.
Such modules are left out: meanwhile others stand in for them. Not while torch is imported, which cannot be imported
again where that fails.
"""

import contextlib
import gc
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mini_engine.messages import Role

logger = logging.getLogger(__name__)

# Each with what it imports. None of this package's modules: `metrics` depends on the process that imports it. None
# starts a thread that outlives a fork, opens a descriptor or looks for a device.
LIBRARIES: dict[Role, tuple[str, ...]] = {
    "core": (),
    "worker": ("torch",),
    "api": ("torch", "fastapi", "aiohttp", "torchvision", "transformers", "transformers.models.auto.processing_auto"),
}
# What libraries use of these while they are imported is a decorator or a class each: see `Unchanged`.
LEFT_OUT = (
    "torch._dynamo",
    "torch._dynamo.utils",
    "transformers.integrations.hub_kernels",
    "transformers.modeling_utils",
)


class Unchanged:
    """In the place of a name of such a module: a class without instances, and a decorator, with or without arguments,
    that changes nothing."""

    def __new__(cls, target: Any = None, *_: Any, **__: Any) -> Any:
        return target if callable(target) else cls


class StandIn(ModuleType):
    """In the place of such a module."""

    def __getattr__(self, name: str) -> type[Unchanged]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unchanged


def preload(role: Role) -> Iterator[None]:
    """Import the libraries of `role` into this process, to be shared with the children that it starts from then on. One
    is imported at each step, which may take seconds; at once where all are imported already."""
    for name in LIBRARIES[role]:
        if name not in sys.modules:
            gc.disable()  # collections would take a quarter of the time
            try:
                with contextlib.nullcontext() if name == "torch" else stand_ins(), one_scan():
                    importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - the children import it as it is, and log what they cannot do
                logger.warning("each process imports %s itself, since here it failed: %s", name, error)
            gc.freeze()  # a collector that walked the objects would copy their pages in each process
            gc.enable()
            yield


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Leave out LEFT_OUT; what imports one afterwards gets it."""
    absent = {name: StandIn(name) for name in LEFT_OUT if name not in sys.modules}
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextlib.contextmanager
def one_scan() -> Iterator[None]:
    """transformers reads the files of all its models when it is imported, and once more for `transformers.models`. Have
    both ask for the same path, by which the result is in its cache."""
    package: Any = sys.modules.get("transformers.utils.import_utils")
    if package is None:
        yield
        return
    scan = package.define_import_structure
    package.define_import_structure = lambda path, *rest, **named: scan(
        Path(path) if Path(path).is_dir() else Path(path).parent, *rest, **named
    )
    try:
        yield
    finally:
        package.define_import_structure = scan
