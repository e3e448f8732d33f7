"""What the supervisor imports for its children."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys, torch
from mini_engine.launch.preload import preload

def look(*_):
    os._exit(1)

torch._C._cuda_getDeviceCount = torch._C._cuda_init = look
before = os.listdir("/proc/self/fd")
for _ in preload("api"):
    pass
assert os.listdir("/proc/self/fd") == before
assert "mini_engine.metrics" not in sys.modules
assert not list(preload("worker"))
"""


def test_preloading_looks_for_no_device_and_opens_nothing():
    """A child could not use a device that its parent has initialised, and closes what it has not been given."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
