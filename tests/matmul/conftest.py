from tests.support.devices import device

__all__ = ["device"]
