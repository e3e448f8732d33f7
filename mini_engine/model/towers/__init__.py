"""The vision towers: one that all families share, and what each family does otherwise."""
