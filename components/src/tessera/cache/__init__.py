"""The CPU cache of vision rows, and the single flight in front of it."""

from tessera.cache.lru import CacheStats, EmbeddingCache
from tessera.cache.single_flight import SingleFlight

__all__ = ["CacheStats", "EmbeddingCache", "SingleFlight"]
