"""Runs the towers of a model over calibration inputs, packed as the engines pack them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import torch

from tessera.engine.batch import PackedInput, TextBatch, VisionBatch, output_rows, pack, pack_images
from tessera.errors import ConfigError
from tessera.models.base import Content, Model, Pixels, Role, TextModule, VisionModule
from tessera_engines.calibration import Calibration, prompt_tokens

_TOKENS: Final = 4096
_UNITS: Final = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Batches of the texts, and of the images; vision rows are made anew by each call."""

    model: Model
    texts: list[TextBatch]
    images: list[VisionBatch]

    @classmethod
    def of(cls, model: Model, source: Calibration, most: int) -> Inputs:
        """Take up to ``most`` texts and images, spread over the source.

        A line is a query and a passage by turns. Raises ``ConfigError`` for a source without either, and
        ``InvalidInput`` for an input that the model refuses.
        """
        texts = [
            _text(model, line, where, (Role.PASSAGE, Role.QUERY)[number % 2])
            for number, (where, line) in enumerate(spread(list(source.lines.items()), most))
        ]
        pixels = []
        if model.vision is not None:
            pixels = [model.preprocess(picture) for picture in spread(source.pictures(), most)]
        if not texts and not pixels:
            raise ConfigError("calibration: the source holds neither an image nor a line of text")
        return cls(model=model, texts=_packed(texts), images=_packed_images(model, pixels))

    @torch.inference_mode()
    def vision_rows(self, module: VisionModule) -> list[torch.Tensor]:
        """Return the rows of each image, float32 ``[rows, row_width]``."""
        found: list[torch.Tensor] = []
        for batch in self.images:
            rows = module(
                torch.from_numpy(np.concatenate(batch.pixels)),
                torch.from_numpy(batch.positions),
                torch.from_numpy(batch.cu_units),
                batch.units,
            )
            found += torch.split(rows.float(), [plan.rows for plan in batch.plans])
        return found

    def with_images(self, rows: Sequence[torch.Tensor]) -> list[TextBatch]:
        """Return the text batches, and those of the images alone, with their vision rows."""
        model = self.model
        if model.vision is None or model.vision.gives_output:
            return self.texts
        plans = [plan for batch in self.images for plan in batch.plans]
        prompts = [prompt_tokens(model, Content(parts=(plan,), role=Role.PASSAGE), "image") for plan in plans]
        made = [
            PackedInput(
                tokens=tokens,
                positions=model.positions(tokens, (plan,)),
                vision=(own,),
                vision_index=model.vision_index(tokens),
            )
            for tokens, plan, own in zip(prompts, plans, rows, strict=True)
        ]
        return [*self.texts, *_packed(made)]

    @torch.inference_mode()
    def outputs(self, module: TextModule, batches: Sequence[TextBatch]) -> torch.Tensor:
        """Return float32 ``[rows, width]`` of all batches, scaled as they are answered."""
        width = self.model.vision.row_width if self.model.vision else 0
        found = []
        for batch in batches:
            computed = module(
                torch.from_numpy(batch.input_ids),
                torch.from_numpy(batch.positions),
                torch.from_numpy(batch.cu_seqlens),
                batch.lengths,
                torch.cat(batch.vision) if batch.vision else torch.empty(0, width),
                torch.from_numpy(batch.vision_index),
            )
            found.append(output_rows(computed.numpy(), batch, self.model.output).values)
        return torch.from_numpy(np.concatenate(found))


def spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many of the items, at even distances."""
    return (
        [items[number * len(items) // most] for number in range(most)] if len(items) > most else list(items)
    )


def _text(model: Model, line: str, where: str, role: Role) -> PackedInput:
    tokens = prompt_tokens(model, Content(parts=(line,), role=role), where)
    return PackedInput(tokens=tokens, positions=model.positions(tokens, ()))


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
