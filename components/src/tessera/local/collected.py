"""Collects the rows of one output, group by group, in the form that a Python program gets them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tessera.frontend.api.formats import finish
from tessera.models.base import OutputKind
from tessera.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """The weights of an input: float32 ``values`` of int32 ``indices``, ascending token ids, both ``[n]``."""

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


class Collected(Protocol):
    """The rows of one output so far."""

    def add(self, rows: Rows) -> None:
        """Take the rows of the next inputs."""
        ...

    def result(self) -> Any:
        """Return all of them; there is nothing to add any more."""
        ...


def collecting(kind: OutputKind, width: int, inputs: int) -> Collected:
    """Return what collects an output's rows, cut to a width; about how many inputs there will be."""
    match kind:
        case OutputKind.SPARSE:
            return _Weights()
        case OutputKind.TOKENS:
            return _Matrices(width)
        case _:
            return _Table(width, inputs)


class _Table:
    """A vector of each input, float32 ``[inputs, width]``."""

    def __init__(self, width: int, inputs: int) -> None:
        # It grows in place where the number of inputs is not known: twice the result is never in memory.
        self._table = np.empty((inputs, width), np.float32)
        self._done = 0

    def add(self, rows: Rows) -> None:
        done, width = self._done, self._table.shape[1]
        values = finish(rows.values, width=width, normalize=True)
        if done + len(values) > len(self._table):
            self._table.resize((done + done // 4 + len(values), width), refcheck=False)
        self._table[done : done + len(values)] = values
        self._done += len(values)

    def result(self) -> npt.NDArray[np.float32]:
        self._table.resize((self._done, self._table.shape[1]), refcheck=False)
        return self._table


class _Matrices:
    """A float32 ``[tokens, width]`` of each input."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._several: list[npt.NDArray[np.float32]] = []

    def add(self, rows: Rows) -> None:
        values = finish(rows.values, width=self._width, normalize=True)
        self._several += [own.copy() for own in np.split(values, rows.bounds[1:-1])]

    def result(self) -> list[npt.NDArray[np.float32]]:
        return self._several


class _Weights:
    """The weights of each input."""

    def __init__(self) -> None:
        self._several: list[SparseVector] = []

    def add(self, rows: Rows) -> None:
        assert rows.indices is not None
        inner = rows.bounds[1:-1]
        ids, weights = np.split(rows.indices, inner), np.split(rows.values[:, 0], inner)
        self._several += [SparseVector(a.copy(), b.copy()) for a, b in zip(ids, weights, strict=True)]

    def result(self) -> list[SparseVector]:
        return self._several
