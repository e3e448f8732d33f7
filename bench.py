"""Measure mini-engine: `python bench.py REGIME [flags]`; `python bench.py --help` lists the regimes."""

if __name__ == "__main__":
    try:
        from mini_engine.bench.cli import main
    except KeyboardInterrupt:  # nothing has been started yet
        raise SystemExit(130) from None
    raise SystemExit(main())
