"""What the fork server of `preloaded.py` imports, once for all servers."""

import sys

from setproctitle import setproctitle

from mini_engine.launch.preload import preload

for _ in preload("api"):
    pass
for name in [name for name in sys.modules if name.partition(".")[0] == "mini_engine"]:
    del sys.modules[name]  # some read the environment when they are imported
setproctitle("tests: preloaded")  # finds its place by the environment, which is another one in a server
