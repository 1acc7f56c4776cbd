"""What FP8 costs in retrieval by a trained model: what is found in one precision beside another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.stages import Precision, ReadInput, Stages, Towers, Vectors, read, vectors
from tessera.models import Model, open_model
from tessera.models.base import Role

NEAREST: Final = 10
_SAMPLES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """``own`` is the number of the item that each query asks for."""

    items: Sequence[str | bytes]
    queries: Sequence[str]
    own: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The items and the queries as a model reads them in any precision."""

    items: list[ReadInput]
    queries: list[ReadInput]

    @classmethod
    def of(cls, model: Model, retrieval: Retrieval) -> Prompts:
        return cls(
            items=read(model, retrieval.items, Role.PASSAGE),
            queries=read(model, retrieval.queries, Role.QUERY),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Vectors of unit length of items and queries, and the numbers of the items nearest to each query."""

    items: Vectors
    queries: Vectors
    nearest: npt.NDArray[np.int64]

    @classmethod
    def of(cls, items: Vectors, queries: Vectors) -> Embedded:
        return cls(items=items, queries=queries, nearest=nearest_of(items, queries))


def embedded(model: Model, stages: Stages, prompts: Prompts) -> Embedded:
    """Embed everything, and find what is nearest."""
    return Embedded.of(vectors(model, stages, prompts.items), vectors(model, stages, prompts.queries))


def embedded_on_cpu(precision: Precision, retrieval: Retrieval) -> tuple[Embedded, float]:
    """In a process of its own: everything in one precision, and the processor seconds of it."""
    model = open_model(precision.model)
    prompts, stages = Prompts.of(model, retrieval), Towers(model, precision)
    started = time.process_time()
    return embedded(model, stages, prompts), time.process_time() - started


class Estimate(NamedTuple):
    """A mean over the queries, and its interval of 95 % by bootstrap over them."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Shares of queries whose item is the nearest or among ``NEAREST``, beside a base.

    ``lost`` is what of the second share is lost to the base; ``overlap`` the mean share of the base's nearest
    items that are still among them, ``cosine`` the least of two such vectors.
    """

    first: Estimate
    among: Estimate
    lost: Estimate
    overlap: float
    cosine: float


def judged(found: Embedded, base: Embedded, own: npt.NDArray[np.int64], *, seed: int = 0) -> Judged:
    """Compare retrieval with that of ``base``, which the same queries were asked."""
    hits, before = ((each.nearest == own[:, None]).any(1).astype(float) for each in (found, base))
    drawn = np.random.default_rng(seed).integers(0, len(own), (_SAMPLES, len(own)), dtype=np.int32)

    def estimate(each: npt.NDArray[np.float64]) -> Estimate:
        low, high = np.quantile([each[one].mean() for one in drawn], (0.025, 0.975))
        return Estimate(float(each.mean()), float(low), float(high))

    both = [len(set(one) & set(other)) for one, other in zip(found.nearest, base.nearest, strict=True)]
    cosines = np.concatenate([(found.items * base.items).sum(1), (found.queries * base.queries).sum(1)])
    return Judged(
        first=estimate((found.nearest[:, 0] == own).astype(float)),
        among=estimate(hits),
        lost=estimate(before - hits),
        overlap=float(np.mean(both)) / NEAREST,
        cosine=float(cosines.min()),
    )


def nearest_of(items: Vectors, queries: Vectors) -> npt.NDArray[np.int64]:
    """Return the numbers of the nearest items of each query, the nearest first."""
    known = torch.from_numpy(items).t()
    found = [(some @ known).topk(NEAREST).indices for some in torch.from_numpy(queries).split(500)]
    return torch.cat(found).numpy()
