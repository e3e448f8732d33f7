from tests.kernels.devices import device

__all__ = ["device"]
