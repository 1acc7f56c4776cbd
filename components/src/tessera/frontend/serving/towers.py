"""Sends texts and images to different workers, where an image's row is its vector."""

from __future__ import annotations

from collections.abc import Sequence

from tessera import wire
from tessera.frontend.serving.dispatch import Answer, Call, Dispatcher
from tessera.models.base import Output
from tessera.rpc import Peers
from tessera.tasks import run_all


class TowersDispatcher:
    """Sends images to the encode workers, which answer alone, and all else to the embed workers.

    Without any encode worker the embed workers get all: those with both stages need none, and the others
    know for how long to wait for one.
    """

    def __init__(self, embed: Dispatcher, encode: Dispatcher, encoders: Peers, output: Output) -> None:
        self._embed = embed
        self._encode = encode
        self._encoders = encoders
        self._output = output

    async def embed(self, items: Sequence[wire.Item], call: Call) -> Answer:
        """As ``Dispatcher.embed``; both kinds of workers are called at once."""
        images = [index for index, item in enumerate(items) if item.images] if self._encoders.ready else []
        if not images or call.outputs:
            return await self._embed.embed(items, call)
        if len(images) == len(items):
            return await self._encode.embed(items, call)
        texts = [index for index, item in enumerate(items) if not item.images]
        parts = await run_all(
            [
                way.embed([items[index] for index in indices], call)
                for way, indices in ((self._embed, texts), (self._encode, images))
            ]
        )
        return self._joined(items, (texts, images), parts)

    def _joined(
        self, items: Sequence[wire.Item], places: Sequence[Sequence[int]], parts: Sequence[Answer]
    ) -> Answer:
        """Return one answer in the order of the items; a failed one's row is zeros in its part, too."""
        joined = Answer.empty(items, self._output)
        for indices, part in zip(places, parts, strict=True):
            joined.rows = joined.rows.put(indices, part.rows)
            for place, index in enumerate(indices):
                joined.cached_tokens[index] = part.cached_tokens[place]
            joined.errors |= {indices[place]: error for place, error in part.errors.items()}
            joined.timings = joined.timings.merge(part.timings)
        return joined
