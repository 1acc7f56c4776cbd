"""Both stages of a model in one precision, by its modules on the CPU or by the engines on a card.

On the CPU products read what a card's read, weights and inputs in e4m3, and are summed in float32; all else
is in bfloat16. Beside a card's, sums have another order and are rounded once more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.card import CardMeter
from benchmarks.checkpoint import usual_units
from benchmarks.engine import Engines, steady
from tessera.checkpoint.loading import as_stored
from tessera.engine.batch import PackedInput, TextBatch, VisionBatch, output_rows, pack, pack_images, tensors
from tessera.engine.settings import EngineSettings
from tessera.imaging import Picture
from tessera.launched import Launched
from tessera.models import Model
from tessera.models.base import Content, Int32Array, Pixels, Role, Truncate

_CPU_TOKENS: Final = 8192
_CARD_TOKENS: Final = 16384
_TYPE: Final[dict[str, Any]] = {"dtype": "bfloat16", "device": "cpu"}

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a checkpoint's products are computed: ``stored`` with its own scales, ``keep`` layers dynamically.

    ``keep`` is that of ``unquantized_blocks``, None for no FP8.
    """

    name: str
    model: Path
    stored: bool = False
    keep: int | None = None

    def settings(self, budget: int) -> EngineSettings:
        """Of an engine on a card, for batches of so many tokens or units."""
        settings = EngineSettings(max_batch_cost=budget, max_queue_cost=budget, quantization="none")
        if self.stored:
            return msgspec.structs.replace(settings, quantization="stored")
        if self.keep is None:
            return settings
        return msgspec.structs.replace(settings, quantization="fp8", unquantized_blocks=self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadInput:
    """An input as a model reads it: its prompt's tokens, and the pixels of its image."""

    tokens: Int32Array
    pixels: Pixels | None


def read(model: Model, contents: Sequence[str | bytes], role: Role) -> list[ReadInput]:
    """Prompts of texts and encoded images."""
    found = []
    for content in contents:
        pixels = None if isinstance(content, str) else model.preprocess(Picture(content, param="image"))
        part = content if isinstance(content, str) else pixels.plan
        prompt = model.prompt(
            Content(parts=(part,), role=role),
            max_tokens=model.max_tokens,
            truncate=Truncate.END,
            param="input",
        )
        found.append(ReadInput(tokens=prompt.tokens, pixels=pixels))
    return found


class Stages(Protocol):
    """``tokens`` and ``units`` are what a batch may hold."""

    tokens: int
    units: int

    def encode(self, batch: VisionBatch) -> Sequence[torch.Tensor]:
        """Return the vision rows of each image."""
        ...

    def embed(self, batch: TextBatch) -> Vectors: ...


def vectors(model: Model, stages: Stages, inputs: Sequence[ReadInput]) -> Vectors:
    """Return float32 ``[inputs, width]``, computed by ascending lengths."""
    packed = packed_inputs(model, stages, inputs)
    order = sorted(range(len(packed)), key=lambda number: len(packed[number].tokens))
    found = np.empty((len(packed), model.output.width), np.float32)
    for piece in pieces([len(packed[number].tokens) for number in order], stages.tokens):
        numbers = order[piece]
        found[numbers] = stages.embed(pack([packed[number] for number in numbers]))
    return found


def packed_inputs(model: Model, stages: Stages, inputs: Sequence[ReadInput]) -> list[PackedInput]:
    """Encode the images of inputs, and return what the text stage takes."""
    rows = iter([rows for batch in image_batches(model, stages, inputs) for rows in stages.encode(batch)])
    found = []
    for each in inputs:
        plans = () if each.pixels is None else (each.pixels.plan,)
        found.append(
            PackedInput(
                tokens=each.tokens,
                positions=model.positions(each.tokens, plans),
                vision=tuple(next(rows) for _ in plans),
                vision_index=model.vision_index(each.tokens) if plans else np.empty(0, np.int32),
            )
        )
    return found


def image_batches(model: Model, stages: Stages, inputs: Sequence[ReadInput]) -> list[VisionBatch]:
    images = [each.pixels for each in inputs if each.pixels is not None]
    return [
        pack_images(images[piece], [model.unit_positions(image.plan) for image in images[piece]])
        for piece in pieces([image.plan.units for image in images], stages.units)
    ]


def pieces(costs: Sequence[int], budget: int) -> list[slice]:
    """Cut a sequence into pieces of at least one that cost at most ``budget``."""
    bounds, total = [0], 0
    for number, cost in enumerate(costs):
        if total and total + cost > budget:
            bounds.append(number)
            total = 0
        total += cost
    return [slice(*ends) for ends in zip(bounds, [*bounds[1:], len(costs)], strict=True)] if costs else []


class Towers:
    """The modules on the CPU."""

    tokens, units = _CPU_TOKENS, 1

    def __init__(self, model: Model, precision: Precision) -> None:
        self._model = model
        self._text = _loaded(model.load_text, precision)
        self._vision = None if model.vision is None else _loaded(model.load_vision, precision)
        self._none = torch.empty(0, model.vision.row_width if model.vision else 0, dtype=torch.bfloat16)

    @torch.inference_mode()
    def encode(self, batch: VisionBatch) -> Sequence[torch.Tensor]:
        rows: torch.Tensor = self._vision(
            torch.from_numpy(np.concatenate(batch.pixels)),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.cu_units),
            batch.units,
        )
        return torch.split(rows, [plan.rows for plan in batch.plans])

    @torch.inference_mode()
    def embed(self, batch: TextBatch) -> Vectors:
        computed = self._text(tensors(batch, torch.cat(batch.vision) if batch.vision else self._none))
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
class Rate:
    """Inputs a second through both stages one after the other, and the joules of one, if the card says."""

    per_second: float
    joules: float | None


class CardStages:
    """The engines on a card, warm."""

    def __init__(self, model: Model, precision: Precision, *, tokens: int = _CARD_TOKENS) -> None:
        self.tokens, self.units = tokens, usual_units(model)
        self._model = model
        self._engines = Engines(
            model, text=precision.settings(self.tokens), vision=precision.settings(self.units)
        )

    def encode(self, batch: VisionBatch) -> Sequence[torch.Tensor]:
        launched, rows = self._launch(batch)
        launched.result()
        return rows

    def embed(self, batch: TextBatch) -> Vectors:
        return self._engines.text.launch(batch).result().values

    def rate(self, inputs: Sequence[ReadInput], meter: CardMeter, duration: float) -> Rate:
        """Of these inputs again and again, as they come, each stage for so many seconds."""
        packed = packed_inputs(self._model, self, inputs)
        text, vision = self._engines.text, self._engines.vision
        texts = [pack(packed[piece]) for piece in pieces([len(each.tokens) for each in packed], self.tokens)]
        turns = [(_in_turn(text.launch, texts), text.depth, len(texts))]
        if vision is not None and (images := image_batches(self._model, self, inputs)):
            turns.append((_in_turn(lambda batch: self._launch(batch)[0], images), vision.depth, len(images)))
        taken, joules = 0.0, 0.0
        for launch, depth, count in turns:
            started = time.time()
            seconds = count * steady(launch, depth, duration)
            taken += seconds
            joules += seconds * (meter.between(started, time.time()).watts or math.nan)
        per_input = None if math.isnan(joules) else joules / len(inputs)
        return Rate(per_second=len(inputs) / taken, joules=per_input)

    def close(self) -> None:
        self._engines.close()

    def _launch(self, batch: VisionBatch) -> tuple[Launched[object], Sequence[torch.Tensor]]:
        assert self._engines.vision is not None
        counts = [plan.rows for plan in batch.plans]
        rows = torch.split(self._engines.rows(sum(counts)), counts)
        return self._engines.vision.launch(batch, rows), rows


def _in_turn(launch: Callable[[Any], Launched[Any]], batches: Sequence[Any]) -> Callable[[], Launched[Any]]:
    every = cycle(batches)
    return lambda: launch(next(every))
