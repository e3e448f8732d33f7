"""Measure mini-engine: `python bench.py REGIME [flags]`; `python bench.py --help` lists the regimes."""

if __name__ == "__main__":
    from benchmarks.cli import main

    raise SystemExit(main())
