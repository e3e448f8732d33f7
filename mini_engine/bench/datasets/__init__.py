"""The data sets that a benchmark can send; `loading.py` loads one by its name."""

MADE = ("synthetic-video", "synthetic-image", "random-mm", "random", "text")  # here
READ = ("sharegpt", "hf", "custom")  # from files or the hub
NAMES = (*MADE, *READ)
