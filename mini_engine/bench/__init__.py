"""The regimes behind bench.py: what each measures, how, and what it should come to."""
