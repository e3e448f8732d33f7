"""What tests of several folders share: a directory for sockets, a ZMQ context, hypothesis' ways, and what is quick."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import zmq

gc.disable()  # until all tests are imported, nearly all of which stays

# The same examples in each run, however long the machine takes for them: a run that fails does so for what was changed.
# To search further: --hypothesis-profile default.
hypothesis.settings.register_profile(
    "certain", derandomize=True, database=None, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("certain")

pytest_plugins = ["tests.support.api_fixtures", "tests.support.server_fixtures"]

# What `-m quick` runs: tests that start no server, no model and no decoder process.
TESTS = Path(__file__).parent
QUICK = ["test_structure.py", "config", "core", "prompt", "protocol", "transport"]


# A whole run has two processes (pytest-xdist). One takes what is below COMPUTING, which mostly computes, in the time
# that the other, whose servers' latencies are tested, leaves of the cores.
COMPUTING = [
    "test_structure.py",
    "config",
    "core",
    "demo",
    "kernels",
    "model",
    "prompt",
    "protocol",
    "training",
    "worker",
]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before pytest-xdist, which reads these options. Not where some tests were chosen, or one may be debugged."""
    options = config.option
    is_whole = config.args_source is config.ArgsSource.TESTPATHS and options.markexpr == "not slow"
    is_plain = not (options.keyword or options.usepdb or options.collectonly or options.capture == "no")
    has_workers = config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput")
    if is_whole and is_plain and has_workers and options.numprocesses is None:
        options.numprocesses, options.dist = 2, "loadgroup"


def pytest_runtest_setup(item: pytest.Item) -> None:
    group = item.get_closest_marker("xdist_group")
    if group is not None and group.args == ("computing",):
        os.setpriority(os.PRIO_PROCESS, 0, 19)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests below QUICK but the slow ones, which pytest deselects afterwards by `-m`; and name the process of
    each."""
    quick = [TESTS / name for name in QUICK]
    missing = [str(path) for path in quick if not path.exists()]
    assert not missing, f"QUICK names {missing}"
    computing = [TESTS / name for name in COMPUTING]
    for item in items:
        if hasattr(config, "workerinput"):
            is_computing = any(item.path.is_relative_to(path) for path in computing)
            item.add_marker(pytest.mark.xdist_group("computing" if is_computing else "serving"))
        if any(item.path.is_relative_to(path) for path in quick) and item.get_closest_marker("slow") is None:
            item.add_marker("quick")


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Later collections walk only what a file's own tests make: with all libraries each would take a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name (107 bytes in all)."""
    path = Path(tempfile.mkdtemp(prefix="mini-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)
