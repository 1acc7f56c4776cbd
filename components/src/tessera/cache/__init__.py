"""The CPU cache of vision rows, the bounded LRU it is made of, and one for several processes."""

from tessera.cache.lru import BoundedLru, EmbeddingCache
from tessera.cache.shared import SharedCache, file_bytes

__all__ = ["BoundedLru", "EmbeddingCache", "SharedCache", "file_bytes"]
