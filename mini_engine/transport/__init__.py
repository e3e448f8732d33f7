"""How bytes and tensors cross a process border, both ends of each link in one file. Knows nothing of requests."""
