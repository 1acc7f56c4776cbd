"""Which embed worker gets which item."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection

from tessera.rpc import least_loaded

# How far a worker may be above the mean load before an image goes to the next in its ranking, and the
# tokens that are always allowed: with little load the mean says nothing, and leaving a cache costs an
# encode.
LOAD_FACTOR = 1.25
LOAD_SLACK = 16_384


class Router:
    """Picks by what this frontend has in flight, counted in tokens.

    Text goes to the least loaded worker. An image goes to the worker that rendezvous hashing ranks first
    for it (Thaler and Ravishankar, 1998), so that the workers' caches together hold each image once; when
    that worker is overloaded the next in the ranking takes it (bounded loads: Mirrokni, Thorup and
    Zadimoghaddam, 2018). A worker that joins or leaves moves only the images that hash to it.
    """

    def __init__(self, *, factor: float = LOAD_FACTOR, slack: int = LOAD_SLACK) -> None:
        self._factor = factor
        self._slack = slack
        # A Counter: asking about a worker must not leave an entry for it behind.
        self._tokens: Counter[int] = Counter()

    def in_flight(self, instance: int) -> int:
        return self._tokens[instance]

    def pick_text(self, instances: Collection[int]) -> int:
        """``instances`` must not be empty, here and below."""
        return least_loaded(instances, self._tokens)

    def pick_image(self, digest: bytes, instances: Collection[int]) -> int:
        bound = self._factor * sum(self._tokens[instance] for instance in instances) / len(instances)
        ranking = sorted(instances, key=lambda instance: _weight(digest, instance), reverse=True)
        for instance in ranking:
            if self._tokens[instance] <= bound + self._slack:
                return instance
        return ranking[0]

    def started(self, instance: int, tokens: int) -> None:
        self._tokens[instance] += tokens

    def finished(self, instance: int, tokens: int) -> None:
        self._tokens[instance] -= tokens
        if self._tokens[instance] <= 0:
            del self._tokens[instance]


def _weight(digest: bytes, instance: int) -> bytes:
    return hashlib.blake2b(digest, digest_size=8, key=instance.to_bytes(8, "little", signed=False)).digest()
