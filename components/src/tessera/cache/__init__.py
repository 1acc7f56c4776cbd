"""The CPU cache of vision rows, the bounded LRU it is made of, and the single flight in front of it."""

from tessera.cache.lru import BoundedLru, CacheStats, EmbeddingCache
from tessera.cache.single_flight import SingleFlight

__all__ = ["BoundedLru", "CacheStats", "EmbeddingCache", "SingleFlight"]
