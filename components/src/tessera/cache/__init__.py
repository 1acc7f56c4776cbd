"""The CPU cache of vision rows, the bounded LRU it is made of, one for several processes, single flight."""

from tessera.cache.lru import BoundedLru, CacheStats, EmbeddingCache
from tessera.cache.shared import SharedCache, file_bytes
from tessera.cache.single_flight import SingleFlight

__all__ = ["BoundedLru", "CacheStats", "EmbeddingCache", "SharedCache", "SingleFlight", "file_bytes"]
