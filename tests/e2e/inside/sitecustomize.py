"""Barriers and figures inside the processes of a server under test, whose code is the same with and without them.

Python imports this file at the start of every process that has its directory on PYTHONPATH. It waits for a few modules
of the package to be loaded, and wraps functions of theirs. The other end is `tests/e2e/barriers.py`; both work in the
directory that MINI_ENGINE_TEST_INSIDE names, and without that variable nothing happens.

A barrier holds the first passage through it once the file `NAME.armed` is there: it
takes that file under the name `NAME.held.PID`, writes into it what was held, and waits until the file is gone. The
figures of a process are asked for by connecting to its socket, `PID.figures`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

DIRECTORY = os.environ.get("MINI_ENGINE_TEST_INSIDE")
POLL_SECONDS = 0.002

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
# What requests hold, all of it 0 at rest; and what may be kept for those to come.
Figures = tuple[dict[str, int], dict[str, int]]


# --- barriers ---------------------------------------------------------------------------------------------------------


def hold(name: str, tell: Callable[[], dict[str, Any]] = dict) -> None:
    """Stop here if the barrier is armed, until it is let go. `tell` says what is held."""
    held = f"{DIRECTORY}/{name}.held.{os.getpid()}"
    try:
        os.rename(f"{DIRECTORY}/{name}.armed", held)
        with open(held, "r+") as file:  # which is gone if nobody is to be held any more
            json.dump({"pid": os.getpid(), **tell()}, file)
    except FileNotFoundError:
        return
    while os.path.exists(held):
        time.sleep(POLL_SECONDS)


def behind(name: str, when: Callable[..., bool] = lambda *_, **__: True) -> Wrap:
    """A function, behind a barrier for the calls `when` is true of."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                hold(name)
            return function(*args, **kwargs)

        return wrapper

    return wrap


def in_mid_request(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Before a step in the middle of a prompt, or of a video in the vision tower."""

    @functools.wraps(execute)
    def wrapper(runner: Any, step: Any) -> Any:
        told = {
            "chunks": [[chunk.start, chunk.num_tokens] for chunk in step.chunks],
            "encode": [[item.first, item.count] for item in step.encode],
        }
        if any(chunk.start and not chunk.samples for chunk in step.chunks):
            hold("prefilling", lambda: told)
        if any(item.first for item in step.encode):
            hold("encoding", lambda: told)
        return execute(runner, step)

    return wrapper


def scrubbed(write: Callable[..., None]) -> Callable[..., None]:
    """What is written to pages is 0xFF first: a reader of what lay there before gives another answer."""

    @functools.wraps(write)
    def wrapper(memory: Any, extents: Any, *payload: Any) -> None:
        import torch

        write(memory, extents, torch.full((sum(count for _, count in extents) << 16,), 0xFF, dtype=torch.uint8))
        write(memory, extents, *payload)

    return wrapper


def short(available: Callable[[], int]) -> Callable[[], int]:
    """The store is told that no memory is free while there is a file `no-memory`."""
    return lambda: 0 if os.path.exists(f"{DIRECTORY}/no-memory") else available()


# What is else copied in the event loop, for it is small, is copied in a thread: a barrier holds nobody else there.
CONSTANTS: dict[str, dict[str, Any]] = {
    "mini_engine.api.media_store": {"INLINE_COPY_BYTES": 0},
    "mini_engine.api.sending": {"INLINE_COPY_BYTES": 0},
    # So that no test has to wait for minutes.
    "mini_engine.launch.supervisor": {"FIRST_PAUSE_SECONDS": 0.5, "LONGEST_PAUSE_SECONDS": 0.5},
}

# module -> the functions that have a barrier, or are changed, and how
BARRIERS: dict[str, dict[str, Wrap]] = {
    # The phases of a start, in their order.
    "mini_engine.launch.supervisor": {
        "resolve_model": behind("resolving"),
        "bind_listeners": behind("binding"),
        "ProcessGroup": behind("founding"),
        "Restarts.next_pause": behind("backing-off"),
    },
    "mini_engine.log": {"setup": behind("greeting", lambda process, _: process != "supervisor")},
    "mini_engine.api.server": {"load": behind("loading-api"), "HttpServer.startup": behind("listening")},
    "mini_engine.worker.worker": {"load_model": behind("loading-worker"), "warm_up": behind("warming-up")},
    "mini_engine.media.processor": {"MediaProcessor.process_video": behind("processing")},
    "mini_engine.api.media_store": {"MediaStoreClient._copy": behind("storing")},
    "mini_engine.transport.arena": {"WritableMemory.write": scrubbed},
    "mini_engine.worker.media_inputs": {
        # A connection is readable, and nothing has been read from it.
        "MediaInputs._receive": behind("receiving"),
    },
    "mini_engine.core.media_store": {"available_memory": short},
    "mini_engine.core.engine_core": {
        "EngineCore._accept": behind("accepting"),
        "engine_limits": behind("loading-core"),
    },
    "mini_engine.worker.model_runner": {"ModelRunner.execute": in_mid_request},
}


# --- figures: module -> class -> what an instance of it holds and keeps -----------------------------------------------


def of_tensor_queue(sender: Any) -> Figures:
    return {"unconsumed messages": len(sender._held)}, {}


def of_arena(arena: Any) -> Figures:
    return {"arena pages": arena.num_used, "waiting for pages": arena.num_waiting}, {}


def of_core(core: Any) -> Figures:
    held = {
        "requests": len(core.requests),
        "awaiting media": len(core.awaiting_media) + len(core.awaiting_media._by_message),
        "messages in the directory": len(core.arrivals),
        "KV blocks": core.blocks.num_used,
        "encoder tokens in use": core.encoder.num_tokens - core.encoder.num_idle_tokens,
        "media references": core.media.num_references,
        "media bytes in use": core.media.num_bytes_pinned,
        "requests that refer to media": len(core.media._held),
        "reservations": len(getattr(core.media, "_reservations", ())),
        "steps in flight": len(core.steps.in_flight),
        "untold": sum(map(len, (core.steps.finished, core.steps.release, core.steps.drop_senders))),
        "unreferenced": len(core.steps.unreferenced),
    }
    return held, {"encoder tokens": core.encoder.num_tokens, "media bytes": core.media.num_bytes}


def of_inputs(inputs: Any) -> Figures:
    with inputs._lock:
        return {"tensors": len(inputs._table)}, {}


def of_runner(runner: Any) -> Figures:
    begun = len(runner._encoded._begun)
    return {"sequences": len(runner._sequences), "items half encoded": begun}, {
        "encoded items": len(runner._encoded),
        "kept items": len(runner._store),
    }


FIGURES: dict[str, dict[str, Callable[[Any], Figures]]] = {
    "mini_engine.api.admission": {
        "MediaAdmission": lambda admission: (
            {
                "admitted": admission.num_admitted,
                "in line": admission.num_waiting,
                "media bytes": admission.inflight_bytes,
            },
            {},
        ),
        "RequestAdmission": lambda requests: ({"unfinished": requests.unfinished}, {}),
    },
    "mini_engine.api.media_loader": {
        "MediaLoader": lambda loader: (
            {"at work": len(loader._flights), "jobs": len(loader.decoders._places._queue)},
            {},
        ),
    },
    "mini_engine.api.engine": {
        "Engine": lambda engine: ({"samples": len(engine.requests), "preparing": engine.preparing}, {}),
    },
    "mini_engine.api.media_store": {
        "MediaStoreClient": lambda client: (
            {
                "look-ups": len(client._lookups),
                "being written": len(client._writes),
                "requests that refer to media": len(client._looked_up),
            },
            {},
        ),
    },
    "mini_engine.transport.tensor_ipc": {"TensorIpcSender": of_tensor_queue},
    "mini_engine.transport.arena": {"Arena": of_arena},
    "mini_engine.core.engine_core": {"EngineCore": of_core},
    "mini_engine.worker.media_inputs": {"MediaInputs": of_inputs},
    "mini_engine.worker.model_runner": {"ModelRunner": of_runner},
}

watched: weakref.WeakKeyDictionary[Any, Callable[[Any], Figures]] = weakref.WeakKeyDictionary()


def watch(cls: type, figures: Callable[[Any], Figures]) -> None:
    """Count what every instance holds, from the end of its `__init__` on."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        watched[self] = figures

    cls.__init__ = wrapper  # type: ignore[misc]


def all_figures() -> Mapping[str, Mapping[str, int]]:
    """The sums over all instances, counted while they are at work."""
    while True:
        held: Counter[str] = Counter()
        kept: Counter[str] = Counter()
        try:
            for instance, figures in list(watched.items()):
                theirs, keeps = figures(instance)
                held.update(theirs)
                kept.update(keeps)
        except RuntimeError:  # something that was gone through has changed meanwhile
            continue
        return {"held": held, "kept": kept}


def answer_for_good(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # who asked has not waited
            connection.sendall(json.dumps(all_figures()).encode())


@functools.cache
def start_answering() -> None:
    """Once in a process, in a thread of its own."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{DIRECTORY}/{os.getpid()}.figures")
    listener.listen()
    threading.Thread(target=answer_for_good, args=(listener,), name="figures", daemon=True).start()


# --- the way in ------------------------------------------------------------------------------------------------------


def equip(module: Any) -> None:
    """Wrap what the tables name in a module that was just loaded. A name that is gone is an error."""
    for name, value in CONSTANTS.get(module.__name__, {}).items():
        assert hasattr(module, name)
        setattr(module, name, value)
    for path, wrap in BARRIERS.get(module.__name__, {}).items():
        owner_name, _, attribute = path.rpartition(".")
        owner = getattr(module, owner_name) if owner_name else module
        setattr(owner, attribute, wrap(getattr(owner, attribute)))
    for class_name, figures in FIGURES.get(module.__name__, {}).items():
        watch(getattr(module, class_name), figures)
        start_answering()


class Finder(importlib.machinery.PathFinder):
    """Finds the modules of the tables as ever, and has them equipped once they are loaded."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not any(fullname in table for table in (BARRIERS, FIGURES, CONSTANTS)):
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                equip(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if DIRECTORY:
    sys.meta_path.insert(0, Finder)
