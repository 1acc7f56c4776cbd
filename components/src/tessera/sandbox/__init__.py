"""Processes that read hostile files: forked ahead, confined, and replaced when a file ends or holds them."""

from tessera.sandbox.memory import IN_MEMORY, Limits
from tessera.sandbox.pool import Pool, ProcessLost, Stop, in_memory

__all__ = ["IN_MEMORY", "Limits", "Pool", "ProcessLost", "Stop", "in_memory"]
