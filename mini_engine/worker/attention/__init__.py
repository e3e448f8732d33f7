"""Attention over the paged KV cache, recurrent states, and decode steps as CUDA graphs. `sdpa.py` is the reference."""
