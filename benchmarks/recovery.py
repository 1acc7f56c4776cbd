"""How long a fault is felt: answers after faults beside as many from a time without any."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STRETCHES = ((0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 8.0), (8.0, math.inf))
"""Seconds after a fault; what happened in each is looked at together for all faults of a kind."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``at`` is on the clock of the answers."""

    kind: str
    at: float


@dataclass(frozen=True, slots=True)
class Felt:
    """The answers that came ``since`` to ``until`` seconds after faults of one kind; times in seconds.

    ``chance`` is the highest p99 of as many answers in a row before the first fault: what a p99 of so few
    reaches when nothing is wrong. It is nan when there were not so many.
    """

    kind: str
    since: float
    until: float
    answers: int
    p50: float
    p99: float
    slowest: float
    chance: float


def felt(answers: Sequence[tuple[float, float]], faults: Sequence[Fault]) -> list[Felt]:
    """First what came before any fault, then each kind in each of ``STRETCHES`` where anything came.

    ``answers`` are pairs of when an answer came and the seconds that it took. A stretch ends with the next
    fault.
    """
    ordered = sorted(answers)
    calm = [took for at, took in ordered if at < faults[0].at]
    rows = [_felt("nothing", (0.0, math.inf), calm, math.nan)]
    ends = [*(fault.at for fault in faults[1:]), math.inf]
    for kind in dict.fromkeys(fault.kind for fault in faults):
        spans = [(fault.at, end) for fault, end in zip(faults, ends, strict=True) if fault.kind == kind]
        for since, until in STRETCHES:
            own = [
                took
                for at, took in ordered
                if any(begun + since <= at < min(begun + until, end) for begun, end in spans)
            ]
            if own:
                chance = max((percentile(row, 0.99) for row in _in_a_row(calm, len(own))), default=math.nan)
                rows.append(_felt(kind, (since, until), own, chance))
    return rows


def _felt(kind: str, stretch: tuple[float, float], took: list[float], chance: float) -> Felt:
    slowest = max(took, default=math.nan)
    return Felt(kind, *stretch, len(took), percentile(took, 0.5), percentile(took, 0.99), slowest, chance)


def _in_a_row(values: list[float], count: int) -> Iterator[list[float]]:
    return (values[first : first + count] for first in range(len(values) - count + 1))


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: of less than a hundred values the p99 is the largest; nan of none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan
