"""How a matrix of weights is held and multiplied, by its dtype and the device. `linear.py` takes any matrix.

Knows nothing of layers and checkpoints. `kernels` says when Triton is imported.
"""
