"""Measure mini-engine: `python bench.py REGIME [flags]`; `python bench.py --help` lists the regimes."""

from mini_engine.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
