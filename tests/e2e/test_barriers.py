"""The two ends of barriers and figures: nobody is held for good, and nobody who asks silences a process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import threading
from pathlib import Path
from types import ModuleType

import pytest

from tests.e2e.barriers import INSIDE, Barrier, Inside


@pytest.fixture
def inside() -> Inside:
    with Inside() as made:
        yield made


@pytest.fixture
def module(inside) -> ModuleType:
    """As a process of a server has it, but with nothing to wrap."""
    spec = importlib.util.spec_from_file_location("inside", INSIDE / "sitecustomize.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.DIRECTORY = inside.directory
    return made


def test_who_is_let_go_while_he_tells_what_is_held_goes_on(module, inside):
    barrier = Barrier(Path(inside.directory), "a-place")
    barrier.armed.touch()
    passing = threading.Thread(target=module.hold, args=("a-place", lambda: barrier.let_go() or {}), daemon=True)
    passing.start()
    passing.join(60)
    assert not passing.is_alive()


class Counted:
    """It changes while it is counted for the first time."""

    times = 0

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        self.times += 1
        if self.times == 1:
            raise RuntimeError("dictionary changed size during iteration")
        return {"times": self.times}, {}


def test_figures_are_told_again_and_again(module, inside):
    counted = Counted()
    module.watched[counted] = Counted.figures
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{inside.directory}/{os.getpid()}.figures")
        listener.listen()
        with socket.socket(socket.AF_UNIX) as impatient:
            impatient.connect(listener.getsockname())

        def answer() -> None:
            with contextlib.suppress(OSError):
                module.answer_for_good(listener)

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            assert inside.figures(os.getpid())["held"] == {"times": 3}
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            answering.join()
