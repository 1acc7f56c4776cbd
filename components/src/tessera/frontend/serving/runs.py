"""Inputs that are longer than the model reads: cut into runs of tokens, whose vectors' mean is their own.

As vLLM does with ``enable_chunked_processing``: control tokens and prompts stand at the ends of the whole
alone, each run is embedded by itself, and the mean counts each run as often as it has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.frontend.serving.dispatch import Answer
from tessera.rows import Rows

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of several inputs, one input after the other.

    ``bounds``, int64 ``[inputs + 1]``, says which are an input's.
    """

    items: Sequence[wire.Item]
    bounds: npt.NDArray[np.int64]

    @classmethod
    def of(cls, items: Sequence[wire.Item], most: int) -> Runs:
        """Cut items into runs of ``most`` tokens; those with no more are one run, and so are images."""
        runs = [_cut(item, most) for item in items]
        counts = [len(own) for own in runs]
        return cls([run for own in runs for run in own], np.cumsum([0, *counts], dtype=np.int64))

    def joined(self, answer: Answer, vectors: npt.NDArray[np.float32], *, normalize: bool) -> Answer:
        """Return what became of the inputs: the mean of each one's ``vectors``, float32 ``[runs, width]``.

        With ``normalize`` it is scaled to unit length. The first error among the runs of an input is its own.
        """
        firsts, lasts = self.bounds[:-1], self.bounds[1:]
        weights = np.array([run.token_count for run in self.items], np.float64)[:, None]
        # In float64: sums of thousands of tokens lose digits in float32.
        means = np.add.reduceat(weights * vectors, firsts) / np.add.reduceat(weights, firsts)
        if normalize:
            means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        errors = {}
        for run in sorted(answer.errors, reverse=True):
            errors[int(np.searchsorted(lasts, run, side="right"))] = answer.errors[run]
        count = len(firsts)
        return Answer(
            Rows(means.astype(np.float32), np.arange(count + 1), np.ones(count, np.float32)),
            np.add.reduceat(answer.cached_tokens, firsts).tolist(),
            errors,
            answer.timings,
        )


def _cut(item: wire.Item, most: int) -> list[wire.Item]:
    if item.token_count <= most or item.images:
        return [item]
    size = _TOKEN_BYTES * most
    return [
        msgspec.structs.replace(item, tokens=item.tokens[start : start + size])
        for start in range(0, len(item.tokens), size)
    ]
