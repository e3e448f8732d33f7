"""A server that ends with the process that starts it: `python -m mini_engine.launch PID [flags of serve.py]`."""

import sys

from mini_engine.launch.process_setup import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    from mini_engine.launch.cli import serve  # only now: it takes a while, in which that process may end

    sys.exit(serve())
