"""Runs the towers of a model over calibration inputs, packed as the engines pack them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import torch

from tessera.engine.batch import PackedInput, TextBatch, VisionBatch, output_rows, pack, pack_images, tensors
from tessera.errors import ConfigError, InvalidInput
from tessera.models.base import (
    Content,
    ImagePlan,
    Int32Array,
    Model,
    PairLimits,
    PairModel,
    Pairs,
    Pixels,
    Role,
    TextModule,
    Truncate,
    VisionModule,
)
from tessera_engines.calibration import Calibration, prompt_tokens

_TOKENS: Final = 4096
_UNITS: Final = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Batches of the texts, and of the images; vision rows are made anew by each call, on ``device``.

    ``queries`` are what a model of pairs reads its images with, one after another.
    """

    model: Model
    device: str
    texts: list[TextBatch]
    images: list[VisionBatch]
    queries: tuple[str, ...]

    @classmethod
    def of(cls, model: Model, source: Calibration, most: int, device: str = "cpu") -> Inputs:
        """Take up to ``most`` texts and images, spread over the source.

        A line is a query and a passage by turns; for a model of pairs it is a document, and the line before
        it is the query. Raises ``ConfigError`` for a source without either, and for images of pairs without
        a line; ``InvalidInput`` for an input that the model refuses.
        """
        lines = spread(list(source.lines.items()), most)
        queries = tuple(line for _, line in lines)
        texts = [
            _input(
                model,
                Content(parts=(line,), role=(Role.PASSAGE, Role.QUERY)[number % 2]),
                queries[number - 1],
                where,
            )
            for number, (where, line) in enumerate(lines)
        ]
        pixels = []
        if model.vision is not None:
            pixels = [model.preprocess(picture) for picture in spread(source.pictures(), most)]
        if not texts and not pixels:
            raise ConfigError("calibration: the source holds neither an image nor a line of text")
        if pixels and not queries and isinstance(model, PairModel):
            raise ConfigError("calibration: the source holds no line of text, a query for its images")
        images = _packed_images(model, pixels)
        return cls(model=model, device=device, texts=_packed(texts), images=images, queries=queries)

    @torch.inference_mode()
    def vision_rows(self, module: VisionModule) -> list[torch.Tensor]:
        """Return the rows of each image, float32 ``[rows, row_width]``."""
        found: list[torch.Tensor] = []
        for batch in self.images:
            arrays = (np.concatenate(batch.pixels), batch.positions, batch.cu_units)
            pixels, positions, cu_units = (torch.from_numpy(array).to(self.device) for array in arrays)
            rows = module(pixels, positions, cu_units, batch.units)
            found += torch.split(rows.float(), [plan.rows for plan in batch.plans])
        return found

    def with_images(self, rows: Sequence[torch.Tensor]) -> list[TextBatch]:
        """Return the text batches, and those of the images alone, with their vision rows."""
        model = self.model
        if model.vision is None or model.vision.gives_output:
            return self.texts
        plans = [plan for batch in self.images for plan in batch.plans]
        made = [
            _input(
                model,
                Content(parts=(plan,), role=Role.PASSAGE),
                self.queries[number % len(self.queries)] if self.queries else "",
                "image",
                own,
            )
            for number, (plan, own) in enumerate(zip(plans, rows, strict=True))
        ]
        return [*self.texts, *_packed(made)]

    @torch.inference_mode()
    def outputs(self, module: TextModule, batches: Sequence[TextBatch]) -> torch.Tensor:
        """Return float32 ``[rows, width]`` of all batches, scaled as they are answered."""
        width = self.model.vision.row_width if self.model.vision else 0
        found = []
        for batch in batches:
            rows = torch.cat(batch.vision) if batch.vision else torch.empty(0, width, device=self.device)
            computed = module(tensors(batch, rows))
            found.append(output_rows(computed.cpu().numpy(), batch, self.model.output).values)
        return torch.from_numpy(np.concatenate(found))


def spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many of the items, at even distances."""
    return (
        [items[number * len(items) // most] for number in range(most)] if len(items) > most else list(items)
    )


def _input(
    model: Model, content: Content, query: str, where: str, rows: torch.Tensor | None = None
) -> PackedInput:
    """Return a content with the vision rows of its image; for a model of pairs as the query's document."""
    plans = tuple(part for part in content.parts if isinstance(part, ImagePlan))
    if isinstance(model, PairModel):
        tokens = _pair(model, query, content, where)
    else:
        tokens = prompt_tokens(model, content, where)
    return PackedInput(
        tokens=tokens,
        positions=model.positions(tokens, plans),
        vision=() if rows is None else (rows,),
        vision_index=model.vision_index(tokens),
    )


def _pair(model: PairModel, query: str, content: Content, where: str) -> Int32Array:
    limits = PairLimits(tokens=model.max_tokens, truncate=Truncate.END)
    asked = Content(parts=(query,), role=Role.QUERY)
    pairs = Pairs(query=asked, documents=[content], limits=limits, param=where, params=[where])
    (prompt,) = model.pairs(pairs)
    if isinstance(prompt, InvalidInput):
        raise prompt
    return prompt.tokens


def _packed(inputs: Sequence[PackedInput]) -> list[TextBatch]:
    """Pack by length, as many as are not above ``_TOKENS`` together."""
    batches: list[list[PackedInput]] = []
    for one in sorted(inputs, key=lambda one: len(one.tokens)):
        if not batches or sum(len(each.tokens) for each in batches[-1]) + len(one.tokens) > _TOKENS:
            batches.append([])
        batches[-1].append(one)
    return [pack(batch) for batch in batches]


def _packed_images(model: Model, images: Sequence[Pixels]) -> list[VisionBatch]:
    least = 1 if model.vision is None else model.vision.largest.units
    each = max(1, _UNITS // least)
    return [
        pack_images(some, [model.unit_positions(image.plan) for image in some])
        for some in (images[start : start + each] for start in range(0, len(images), each))
    ]
