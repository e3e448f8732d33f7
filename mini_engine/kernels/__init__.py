"""Small operators: `ops.py` says which there are, and takes the fastest of them. Knows nothing of weights and layers.

Nothing outside of this folder and `matmul` imports Triton, and `ops.py` does so at the first use on a device: where
torch came without it, everything runs on the CPU. `TRITON_INTERPRET=1` runs the kernels on the CPU, slowly, for tests.
"""
