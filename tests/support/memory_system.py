"""Several nodes in one process on one in-memory broker: what storms in virtual time run on, for tests."""

from chaos.virtual.system import MemorySystem, NodeClock

__all__ = ["MemorySystem", "NodeClock"]
