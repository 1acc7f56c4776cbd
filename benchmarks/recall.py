"""What FP8 costs in retrieval by a trained model, with its arithmetic on the CPU.

Products read what a card's read, weights and inputs in e4m3, and are summed in float32; all else is in
bfloat16. Beside a card's, sums have another order and are rounded once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tessera.checkpoint.loading import as_stored
from tessera.engine.batch import PackedInput, output_rows, pack, pack_images, tensors
from tessera.imaging import Picture
from tessera.models import Model, open_model
from tessera.models.base import Content, Role, Truncate

NEAREST: Final = 10
_TOKENS: Final = 8192
_UNITS: Final = 16
_SAMPLES: Final = 2000
_TYPE: Final[dict[str, Any]] = {"dtype": "bfloat16", "device": "cpu"}

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """``own`` is the number of the item that each query asks for."""

    items: Sequence[str | bytes]
    queries: Sequence[str]
    own: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Vectors of unit length of items and queries, and the processor seconds that they took."""

    items: Vectors
    queries: Vectors
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a checkpoint's products are computed: ``stored`` with its own scales, ``keep`` layers dynamically.

    ``keep`` is that of ``unquantized_blocks``, None for no FP8.
    """

    name: str
    model: Path
    stored: bool = False
    keep: int | None = None


def embedded(precision: Precision, retrieval: Retrieval) -> Embedded:
    """Embed everything in one precision."""
    model = open_model(precision.model)
    towers = Towers(model, precision)
    started = time.process_time()
    items = towers.vectors(retrieval.items, Role.PASSAGE)
    queries = towers.vectors(retrieval.queries, Role.QUERY)
    return Embedded(items=items, queries=queries, seconds=time.process_time() - started)


class Towers:
    """Both towers of a model in one precision."""

    def __init__(self, model: Model, precision: Precision) -> None:
        self._model = model
        self._text = _loaded(model.load_text, precision)
        self._vision = None if model.vision is None else _loaded(model.load_vision, precision)

    def vectors(self, contents: Sequence[str | bytes], role: Role) -> Vectors:
        """Return float32 ``[contents, width]`` of texts and encoded images."""
        inputs = [self._input(content, role) for content in contents]
        order = sorted(range(len(inputs)), key=lambda number: len(inputs[number].tokens))
        found = np.empty((len(inputs), self._model.output.width), np.float32)
        start = 0
        while start < len(order):
            stop, total = start, 0
            while stop < len(order) and (stop == start or total + len(inputs[order[stop]].tokens) <= _TOKENS):
                total += len(inputs[order[stop]].tokens)
                stop += 1
            found[order[start:stop]] = self._run([inputs[number] for number in order[start:stop]])
            start = stop
        return found

    def _input(self, content: str | bytes, role: Role) -> PackedInput:
        model = self._model
        if isinstance(content, str):
            tokens = self._tokens(Content(parts=(content,), role=role))
            return PackedInput(tokens=tokens, positions=model.positions(tokens, ()))
        pixels = model.preprocess(Picture(content, param="image"))
        tokens = self._tokens(Content(parts=(pixels.plan,), role=role))
        return PackedInput(
            tokens=tokens,
            positions=model.positions(tokens, (pixels.plan,)),
            vision=(self._rows(pixels),),
            vision_index=model.vision_index(tokens),
        )

    def _tokens(self, content: Content) -> npt.NDArray[np.int32]:
        model = self._model
        return model.prompt(content, max_tokens=model.max_tokens, truncate=Truncate.END, param="input").tokens

    @torch.inference_mode()
    def _rows(self, pixels: Any) -> torch.Tensor:
        batch = pack_images([pixels], [self._model.unit_positions(pixels.plan)])
        rows: torch.Tensor = self._vision(
            torch.from_numpy(pixels.values),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.cu_units),
            batch.units,
        )
        return rows

    @torch.inference_mode()
    def _run(self, inputs: Sequence[PackedInput]) -> Vectors:
        batch = pack(inputs)
        width = self._model.vision.row_width if self._model.vision else 0
        none = torch.empty(0, width, dtype=torch.bfloat16)
        computed = self._text(tensors(batch, torch.cat(batch.vision) if batch.vision else none))
        return output_rows(computed.numpy(), batch, self._model.output).values


def _loaded(load: Callable[..., Any], precision: Precision) -> Any:
    if precision.stored:
        with as_stored():
            return load(**_TYPE)
    module = load(**_TYPE)
    if precision.keep is not None:
        with torch.inference_mode():
            module.quantise(keep=precision.keep)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Shares of queries whose item is the nearest or among ``NEAREST``, beside a base.

    ``lost`` is what of the second share is lost to the base, with its interval of 95 %; ``overlap`` the mean
    share of the base's nearest items that are still among them, ``cosine`` the least of two such vectors.
    """

    first: float
    among: float
    lost: tuple[float, float, float]
    overlap: float
    cosine: float


def judged(found: Embedded, base: Embedded, own: npt.NDArray[np.int64], *, seed: int = 0) -> Judged:
    """Compare retrieval with that of ``base``, by bootstrap over the queries, which both share."""
    nearest, wanted = nearest_of(found), nearest_of(base)
    hits, before = ((each == own[:, None]).any(1).astype(float) for each in (nearest, wanted))
    chance = np.random.default_rng(seed)
    drawn = chance.integers(0, len(own), (_SAMPLES, len(own)), dtype=np.int32)
    losses = np.array([(before[one] - hits[one]).mean() for one in drawn])
    low, high = np.quantile(losses, (0.025, 0.975))
    both = [len(set(one) & set(other)) / NEAREST for one, other in zip(nearest, wanted, strict=True)]
    cosines = np.concatenate([(found.items * base.items).sum(1), (found.queries * base.queries).sum(1)])
    return Judged(
        first=float((nearest[:, 0] == own).mean()),
        among=float(hits.mean()),
        lost=(float((before - hits).mean()), float(low), float(high)),
        overlap=float(np.mean(both)),
        cosine=float(cosines.min()),
    )


def interval(embedded: Embedded, own: npt.NDArray[np.int64], *, seed: int = 0) -> tuple[float, float]:
    """Return the interval of 95 % of the share of queries whose item is among the nearest."""
    hits = (nearest_of(embedded) == own[:, None]).any(1).astype(float)
    drawn = np.random.default_rng(seed).integers(0, len(own), (_SAMPLES, len(own)), dtype=np.int32)
    low, high = np.quantile(np.array([hits[one].mean() for one in drawn]), (0.025, 0.975))
    return float(low), float(high)


def nearest_of(embedded: Embedded) -> npt.NDArray[np.int64]:
    """Return the numbers of the nearest items of each query, the nearest first."""
    found = []
    for start in range(0, len(embedded.queries), 500):
        scores = embedded.queries[start : start + 500] @ embedded.items.T
        some = np.argpartition(-scores, NEAREST, axis=1)[:, :NEAREST]
        order = np.argsort(-np.take_along_axis(scores, some, 1), axis=1, kind="stable")
        found.append(np.take_along_axis(some, order, 1))
    return np.concatenate(found)
