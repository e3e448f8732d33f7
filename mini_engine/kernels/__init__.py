"""Fused operators: what the model and the worker call is in `ops.py`; the other files are Triton, for CUDA alone,
but for `staging.py`, which copies small tensors to the device.

Nothing outside of this folder imports Triton, and `ops.py` does so at the first use on a device: where torch came
without it, everything runs on the CPU. Under `TRITON_INTERPRET=1` the kernels run on the CPU, slowly, for tests.
"""
