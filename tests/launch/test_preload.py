"""What the supervisor imports for its children."""

import subprocess
import sys


def test_preloading_looks_for_no_device_opens_nothing_and_leaves_out_what_has_no_use():
    """A child could not use a device that its parent has initialised, and closes what it has not been given. A module
    that is left out can still be imported, by the code of a model."""
    program = """
import logging, os, sys
from mini_engine.launch.preload import LEFT_OUT, preload

def look(*_):
    os._exit(1)

logging.Logger.warning = look
for _ in preload("worker"):
    import torch
torch._C._cuda_getDeviceCount = torch._C._cuda_init = look
before = os.listdir("/proc/self/fd")
for _ in preload("api"):
    pass
assert os.listdir("/proc/self/fd") == before
assert not {"mini_engine.metrics", *LEFT_OUT} & sys.modules.keys()
assert not list(preload("worker"))
from transformers.modeling_utils import PreTrainedModel
assert PreTrainedModel.__init__ and "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
