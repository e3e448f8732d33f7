"""What tests of several folders share: a directory for sockets, a ZMQ context, hypothesis' ways, and what is quick."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import zmq
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

gc.disable()  # until all tests are imported, nearly all of which stays

# `nohup` and `&` start a process with these ignored, and its child processes inherit that; tests send them to servers.
# Handlers are not inherited, and one that does nothing ignores them as well.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# The same examples in each run, however long the machine takes for them: a run that fails does so for what was changed.
# To search further: --hypothesis-profile default.
hypothesis.settings.register_profile(
    "certain", derandomize=True, database=None, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("certain")

pytest_plugins = ["tests.support.fixtures"]

# What `-m quick` runs: tests that start no server, no model and no decoder process.
QUICK = ["test_structure.py", "config", "core", "prompt", "protocol", "transport"]


# A whole run has two processes (pytest-xdist): one for these folders, whose servers' latencies are tested, and one for
# the other files, in the time that the first leaves of the cores. The first takes some of these once it has no other.
SERVING = tuple(f"tests/{name}/" for name in ("batch", "cluster", "e2e", "faults", "launch"))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Which tests go together. They start in the order of their names, so those of the serving folders first."""
    config.option.loadscopereorder = False
    made = LoadScopeScheduling(config, log)
    made._split_scope = lambda nodeid: "serving" if nodeid.startswith(SERVING) else nodeid.partition("::")[0]
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before pytest-xdist, which reads the option. Not where some tests were chosen, or one may be debugged."""
    options, is_worker = config.option, hasattr(config, "workerinput")
    is_whole = config.args_source is config.ArgsSource.TESTPATHS and options.markexpr == "not slow"
    is_plain = not (options.keyword or options.usepdb or options.collectonly or options.capture == "no")
    if is_whole and is_plain and not is_worker and options.numprocesses is None:
        options.numprocesses = 2


def pytest_runtest_setup(item: pytest.Item) -> None:
    if hasattr(item.config, "workerinput") and not item.nodeid.startswith(SERVING):
        os.setpriority(os.PRIO_PROCESS, 0, 10)
    for mark, count in {"gpu": 1, "multi_gpu": 2}.items():
        if item.get_closest_marker(mark) is not None:
            import torch  # which takes a second

            if torch.cuda.device_count() < count:
                pytest.skip(f"needs {count} CUDA device(s)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests below QUICK but the slow ones, which pytest deselects afterwards by `-m`."""
    quick = [Path(__file__).parent / name for name in QUICK]
    missing = [str(path) for path in quick if not path.exists()]
    assert not missing, f"QUICK names {missing}"
    for item in items:
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
