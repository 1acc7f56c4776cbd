"""What a picture shows, without how it is drawn: exactly what its full caption says."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Group:
    """``count`` equal shapes at one of nine places; ``size`` is empty unless there is one shape only."""

    count: int
    size: str
    colour: str
    shape: str
    place: str


@dataclass(frozen=True, slots=True)
class Scene:
    """One to three groups, each at a place of its own, in the order of ``PLACES``."""

    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Thing:
    colour: str
    shape: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two shapes and how the first lies to the second."""

    first: Thing
    relation: str
    second: Thing


@dataclass(frozen=True, slots=True)
class Page:
    """Lines of words, under a title or without one."""

    title: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.title, *(word for line in self.lines for word in line))


@dataclass(frozen=True, slots=True)
class Chart:
    """``labels`` in reading order; only which is highest and which lowest is told, not the values."""

    kind: str
    colour: str
    title: tuple[str, ...]
    labels: tuple[str, ...]
    highest: str
    lowest: str


@dataclass(frozen=True, slots=True)
class Table:
    """``rows`` are names with one number under each of ``columns``."""

    title: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[int, ...]], ...]


Composition = Scene | Pair | Page | Chart | Table

_HELD_OUT_SHARE = 8


def written(composition: Composition) -> frozenset[str]:
    """Every word that can be read on the picture, numbers aside."""
    match composition:
        case Page():
            return frozenset(composition.words)
        case Chart():
            return frozenset((*composition.title, *composition.labels))
        case Table():
            names = (name for name, _ in composition.rows)
            return frozenset((*composition.title, *composition.columns, *names))
        case _:
            return frozenset()


def key(composition: Composition) -> str:
    """Equal for equal compositions and for no others, whatever the process."""
    return repr(composition)


def is_held_out(composition: Composition) -> bool:
    """Every composition is on one side for good: one in eight is never trained on, whatever the seed."""
    return blake2b(key(composition).encode(), digest_size=8).digest()[0] % _HELD_OUT_SHARE == 0
