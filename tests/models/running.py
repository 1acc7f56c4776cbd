"""Runs a model's modules over whole inputs, as the engines would: packed, all in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tessera.engine.batch import PackedInput, TextBatch, output_rows, pack, pack_images, tensors
from tessera.imaging import Picture
from tessera.models.base import (
    Content,
    Model,
    NamingModule,
    OutputKind,
    PairLimits,
    PairModel,
    Pairs,
    Pixels,
    Prompt,
    Role,
    TextModule,
    TextTensors,
    Truncate,
    VisionModule,
)

Parts = tuple[str | bytes | tuple[int, ...], ...]
"""Texts, encoded images, or token ids."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """One input; an image occurs as its file."""

    parts: Parts
    role: Role = Role.NONE
    instruction: str | None = None

    @property
    def images(self) -> list[bytes]:
        return [part for part in self.parts if isinstance(part, bytes)]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What a reranker scores."""

    query: Given
    document: Given

    @property
    def images(self) -> list[bytes]:
        return [*self.query.images, *self.document.images]


@torch.no_grad()
def vision_rows(model: Model, vision: VisionModule, images: Sequence[Pixels]) -> list[torch.Tensor]:
    """The rows of each image, from one launch."""
    device, batch = _device(vision), pack_images(images, [model.unit_positions(each.plan) for each in images])
    rows = vision(
        torch.from_numpy(np.concatenate(batch.pixels)).to(device),
        torch.from_numpy(batch.positions).to(device),
        torch.from_numpy(batch.cu_units).to(device),
        batch.units,
    )
    return list(rows.split([each.plan.rows for each in images]))


def prompts(model: Model, inputs: Sequence[Given | Pair], pixels: dict[bytes, Pixels]) -> list[Prompt]:
    return [prompt(model, each, pixels) for each in inputs]


def prompt_of(
    model: Any, *parts: Any, limit: int = 8192, truncate: Truncate = Truncate.NONE, **more: Any
) -> Prompt:
    """The prompt of parts, by the name ``input[3]``; ``more`` are fields of ``Content``."""
    content = Content(parts=with_ids(parts), **more)
    made: Prompt = model.prompt(content, max_tokens=limit, truncate=truncate, param="input[3]")
    return made


def prompt(model: Model, given: Given | Pair, pixels: dict[bytes, Pixels]) -> Prompt:
    if isinstance(given, Given):
        content = content_of(given, pixels)
        return model.prompt(content, max_tokens=model.max_tokens, truncate=Truncate.NONE, param="x")
    assert isinstance(model, PairModel)
    query, document = content_of(given.query, pixels), content_of(given.document, pixels)
    limits = PairLimits(tokens=model.max_tokens)
    (made,) = model.pairs(Pairs(query=query, documents=[document], limits=limits, param="x", params=["y"]))
    assert isinstance(made, Prompt)
    return made


def with_ids(parts: Sequence[Any]) -> tuple[Any, ...]:
    """Parts in which token ids are written as a tuple or a list, as a content has them."""
    return tuple(np.array(part, np.int64) if isinstance(part, tuple | list) else part for part in parts)


def content_of(given: Given, pixels: dict[bytes, Pixels]) -> Content:
    parts = [pixels[part].plan if isinstance(part, bytes) else part for part in given.parts]
    return Content(
        parts=with_ids(parts),
        role=given.role,
        instruction=given.instruction,
    )


def preprocessed(model: Model, inputs: Sequence[Given | Pair]) -> dict[bytes, Pixels]:
    """The pixels of every image that occurs, by its file."""
    files = dict.fromkeys(image for each in inputs for image in each.images)
    return {file: model.preprocess(Picture(file, param="x")) for file in files}


def batch_of(model: Model, vision: VisionModule | None, inputs: Sequence[Given | Pair]) -> TextBatch:
    """All inputs in one batch, and all their images through one launch."""
    pixels = preprocessed(model, inputs)
    rows: dict[bytes, torch.Tensor] = {}
    if pixels:
        assert vision is not None
        rows = dict(zip(pixels, vision_rows(model, vision, list(pixels.values())), strict=True))
    return pack(
        [
            PackedInput(
                tokens=prompt.tokens,
                positions=model.positions(prompt.tokens, [pixels[image].plan for image in each.images]),
                vision=tuple(rows[image] for image in each.images),
                vision_index=model.vision_index(prompt.tokens),
            )
            for each, prompt in zip(inputs, prompts(model, inputs, pixels), strict=True)
        ]
    )


@torch.no_grad()
def vectors(model: Model, text: TextModule, batch: TextBatch) -> np.ndarray:
    """What the model gives for a batch, float32 ``[rows, width]``.

    Sparse weights are as wide as the vocabulary.
    """
    if batch.vision and model.vision is not None and model.vision.gives_output:
        return _vectors_apart(model, text, batch)
    device = _device(text)
    width = model.vision.row_width if model.vision else model.output.width
    rows = torch.cat(batch.vision) if batch.vision else torch.empty(0, width)
    given = on(device, tensors(batch, rows))
    if model.output.kind is OutputKind.SPARSE:
        assert isinstance(text, NamingModule)
        (weights,) = text.named(("",), given)
        assert weights.indices is not None
        ids = weights.indices.view(len(batch.lengths), -1).long()
        whole = torch.zeros(len(ids), model.vocab_size, device=device)
        # What holds nothing is 0.
        return whole.scatter_add(1, ids.clamp(min=0), weights.values.view(ids.shape)).cpu().numpy()
    rows = output_rows(text(given).cpu().numpy(), batch, model.output)
    # Tokens of a skiplist have no row in the answer.
    return rows.values if rows.indices is None else rows.values[rows.indices >= 0]


def found_by(
    model: Model, inputs: Sequence[Given | Pair], *, dtype: str = "float32", device: str = "cpu"
) -> np.ndarray:
    """What a model gives for inputs, from their files and its own weights, all in one batch."""
    vision = None if model.vision is None else model.load_vision(dtype=dtype, device=device)
    text = model.load_text(dtype=dtype, device=device)
    return vectors(model, text, batch_of(model, vision, inputs))


def on(device: torch.device, batch: TextTensors) -> TextTensors:
    """A batch with its tensors on a device."""
    given = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(
        batch, **{key: value.to(device) for key, value in given.items() if isinstance(value, torch.Tensor)}
    )


def _vectors_apart(model: Model, text: TextModule, batch: TextBatch) -> np.ndarray:
    """As ``vectors``, where the one row of an image is its vector."""
    inputs = [
        PackedInput(tokens=batch.input_ids[start:stop], positions=batch.positions[:, start:stop])
        for start, stop in pairwise(batch.cu_seqlens)
    ]
    found = np.empty((len(inputs), model.output.width), np.float32)
    images = np.searchsorted(batch.cu_seqlens, batch.vision_index, side="right") - 1
    found[images] = np.stack([rows[0].float().cpu().numpy() for rows in batch.vision])
    found[images] /= np.linalg.norm(found[images], axis=1, keepdims=True)
    texts = np.setdiff1d(np.arange(len(inputs)), images)
    if len(texts):
        found[texts] = vectors(model, text, pack([inputs[number] for number in texts]))
    return found


def company(model: Model, inputs: Sequence[Given]) -> float:
    """The worst cosine of vectors that were computed alone, and in one batch in the opposite order."""
    text = model.load_text(dtype="float32", device="cpu")
    alone = np.concatenate([vectors(model, text, batch_of(model, None, [given])) for given in inputs])
    together = vectors(model, text, batch_of(model, None, inputs[::-1]))[::-1]
    return float(cosines(together, alone).min())


def nearest(rows: np.ndarray) -> float:
    """The largest cosine of two different rows of length 1."""
    return float((rows @ rows.T - np.eye(len(rows))).max())


def errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The difference of each pair's logits, as a share of how far all of them deviate."""
    worst: np.ndarray = np.abs(found - expected).max(axis=-1) / expected.std()
    return worst


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest of ``errors``."""
    return float(errors(found, expected).max())


def cosines(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The cosine of each row with its fellow, in float64."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    return np.einsum("ij,ij->i", found, expected) / lengths


def _device(module: object) -> torch.device:
    assert isinstance(module, torch.nn.Module)
    return next(module.parameters()).device
