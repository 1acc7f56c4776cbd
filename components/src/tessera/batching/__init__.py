"""One queue, one open next batch and one engine thread for each engine."""

from tessera.batching.batcher import Batcher, Events
from tessera.batching.queue import Entry, Outcome

__all__ = ["Batcher", "Entry", "Events", "Outcome"]
