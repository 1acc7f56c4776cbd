"""One queue and one engine thread for each engine."""

from tessera.batching.batcher import Batcher, BatchStats
from tessera.batching.queue import Outcome

__all__ = ["BatchStats", "Batcher", "Outcome"]
