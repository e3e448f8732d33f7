from tests.support.tensor_queue import arena, connect, held, ranks

__all__ = ["arena", "connect", "held", "ranks"]
