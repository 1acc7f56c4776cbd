from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tessera.batching import Batcher, Events
from tessera.engine.batch import packed_cost

MakeBatcher = Callable[..., Batcher[int, int]]


@pytest.fixture
async def make_batcher() -> AsyncIterator[MakeBatcher]:
    """Batchers that are closed after the test; closing also proves that nothing is left in them."""
    made: list[Batcher[int, int]] = []

    def make(launch: Any, **changes: Any) -> Batcher[int, int]:
        events = {
            name: changes.pop(name) for name in ("entries", "sizes", "seconds", "died") if name in changes
        }
        options: dict[str, Any] = {
            "events": Events(**events),
            "cost": packed_cost,
            "budget": 100,
            "max_queued": 1000,
            "depth": 1,
        }
        made.append(Batcher("test", launch, **(options | changes)))
        return made[-1]

    yield make
    for batcher in made:
        await batcher.close()
        assert batcher.queued == 0
