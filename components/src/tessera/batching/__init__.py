"""One queue, one open next batch and one engine thread for each engine."""

from tessera.batching.batcher import Batcher, BatchStats, Events
from tessera.batching.queue import Outcome

__all__ = ["BatchStats", "Batcher", "Events", "Outcome"]
