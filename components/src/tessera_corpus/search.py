"""Search over an output: exact over its parts, by its index where a Lance table has one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import ConfigError
from tessera.extras import missing
from tessera_corpus.item import Origin
from tessera_corpus.output.columns import ORIGIN, origins_of
from tessera_corpus.output.directory import Description
from tessera_corpus.output.lance import NAME as LANCE_NAME
from tessera_corpus.output.row import VectorKind

_COLUMNS: Final = [*ORIGIN, "content_hash", "vector"]
# Rows that are compared at a time: 128 MB of float32 with 2,048 values each.
_ROWS: Final = 16_384
_EPSILON: Final = 1e-12

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """``score`` is a cosine, or for token vectors the sum of each query vector's best dot product (MaxSim).

    What has the same content is one hit, with all its ``places``.
    """

    score: float
    content_hash: bytes
    places: tuple[Origin, ...]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows with their vectors ``[sum(counts), width]``."""

    places: list[Origin]
    hashes: list[bytes]
    vectors: Matrix
    bounds: npt.NDArray[np.int64]


class Table:
    """The rows of an output of ``tessera embed``."""

    def __init__(self, out: Path) -> None:
        """Raises ``ConfigError`` for a directory that is none, or whose format holds no table."""
        description = Description.read(out)
        if description is None:
            if not out.is_dir():
                raise ConfigError(f"{out}: no such directory")
            raise ConfigError(f"{out}: is not what tessera embed writes")
        if description.format == "openai":
            raise ConfigError(
                f"{out}: holds lines of a batch; a table is searched: --format parquet or lance"
            )
        if not description.kind.width:
            held = ", ".join([column.name for column in description.kind.columns])
            raise ConfigError(
                f"{out}: holds no vectors to compare, only {held}; --outputs named no dense ones"
            )
        self._out = out
        self._lance = description.format == "lance"
        self.kind: VectorKind = description.kind

    @property
    def written(self) -> float:
        """When a part of it was last written, in seconds of the epoch."""
        folder = self._out / (LANCE_NAME if self._lance else "vectors")
        try:
            return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from error

    def search(self, query: Matrix, most: int) -> list[Hit]:
        """The best, the best first; ``query`` is ``[rows, width]``, one row but for token vectors.

        Raises ``ConfigError`` for what cannot be read, and for a query of another width.
        """
        if query.ndim != 2 or query.shape[1] != self.kind.width or (len(query) > 1 and not self.kind.tokens):
            raise ConfigError(f"{self._out}: holds vectors of width {self.kind.width}, not {query.shape}")
        query = query / np.maximum(np.linalg.norm(query, axis=1, keepdims=True), _EPSILON)
        best: list[tuple[float, bytes]] = []
        places: dict[bytes, list[Origin]] = {}
        for batch in self._batches(query, most):
            scores = self._scores(query, batch)
            # Equal contents are one hit: some more rows than hits are looked at.
            least = best[0][0] if len(best) >= most else -np.inf
            for index in np.flatnonzero(scores >= least)[np.argsort(-scores[scores >= least])].tolist():
                score, key = float(scores[index]), batch.hashes[index]
                if key in places:
                    places[key].append(batch.places[index])
                elif len(best) < most:
                    heapq.heappush(best, (score, key))
                    places[key] = [batch.places[index]]
                elif score > best[0][0]:
                    _, gone = heapq.heapreplace(best, (score, key))
                    del places[gone]
                    places[key] = [batch.places[index]]
        return [
            Hit(score=score, content_hash=key, places=tuple(sorted(places[key], key=lambda place: place.id)))
            for score, key in sorted(best, key=lambda each: (-each[0], each[1]))
        ]

    def _scores(self, query: Matrix, batch: _Batch) -> Matrix:
        vectors = batch.vectors
        norms = np.maximum(np.linalg.norm(vectors, axis=1), _EPSILON)
        products: Matrix = (query @ vectors.T) / norms
        if not self.kind.tokens:
            one: Matrix = products[0]
            return one
        found: Matrix = np.maximum.reduceat(products, batch.bounds[:-1], axis=1).sum(axis=0)
        return found

    def _batches(self, query: Matrix, most: int) -> Iterator[_Batch]:
        try:
            if self._lance:
                yield from self._of_lance(query, most)
            else:
                yield from self._of_parquet()
        except ImportError as error:
            raise missing(f"reading {self._out}", error.name or "a package", extra="corpus,lance") from None
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{self._out}: {error}") from error

    def _of_parquet(self) -> Iterator[_Batch]:
        import pyarrow.parquet as pq

        for path in sorted((self._out / "vectors").glob("*.parquet")):
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(_ROWS, columns=_COLUMNS):
                    yield self._batch(batch)

    def _of_lance(self, query: Matrix, most: int) -> Iterator[_Batch]:
        import lance

        table = lance.dataset(str(self._out / LANCE_NAME))
        if not self.kind.tokens and self.kind.dtype != "int8" and table.describe_indices():
            # Twice as many as are wanted: equal contents are one hit.
            nearest: Any = {"column": "vector", "q": query[0], "k": 2 * most}
            found = table.to_table(columns=_COLUMNS, nearest=nearest)
            for batch in found.select(_COLUMNS).to_batches():
                yield self._batch(batch)
            return
        for batch in table.to_batches(columns=_COLUMNS, batch_size=_ROWS):
            yield self._batch(batch)

    def _batch(self, batch: Any) -> _Batch:
        places = list(origins_of(batch))
        vectors = batch.column("vector")
        bounds = np.arange(len(places) + 1, dtype=np.int64)
        if self.kind.tokens:
            lengths = np.asarray(vectors.value_lengths()).astype(np.int64)
            bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            vectors = vectors.flatten()
        values = np.asarray(vectors.flatten()).astype(np.float32).reshape(-1, self.kind.width)
        return _Batch(places, batch.column("content_hash").to_pylist(), values, bounds)
