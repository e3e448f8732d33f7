"""Operators: `ops.py` says which there are, and takes the fastest of them; `quantized.py` has matrices in 8 and 4 bits.

Nothing outside of this folder imports Triton, and `ops.py` does so at the first use on a device: where torch came
without it, everything runs on the CPU. Under `TRITON_INTERPRET=1` the kernels run on the CPU, slowly, for tests.
"""
