"""The engine batches that are timed: the shapes of real requests, filled with random data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from tessera.engine.batch import PackedInput, TextBatch, VisionBatch, pack, pack_images
from tessera.errors import TesseraError
from tessera.image_plan import ImagePlan
from tessera.models import Model
from tessera.models.base import (
    Content,
    Int32Array,
    PairLimits,
    PairModel,
    Pairs,
    Part,
    Pixels,
    Role,
    Truncate,
)
from tessera_tools.load.bodies import IMAGE_TEXT, Bodies, HttpWorkload
from tessera_tools.load.words import CheckpointWords

Size = tuple[int, int]
"""Width and height of an image, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``items`` inputs in one text batch, each of ``tokens`` tokens or of an image and a few words.

    With ``tokens`` -1 there are as many as the budget has room for, of 9 tokens to 1024 or the longest input.
    """

    name: str
    tokens: int = 0
    size: Size | None = None
    items: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """A vision batch of images of these sizes."""

    name: str
    sizes: tuple[Size, ...]


IMAGE, PAGE = (512, 512), (1275, 1650)
MIXED = (IMAGE, PAGE, (640, 480), (3000, 500), (224, 224), (1920, 1080), (37, 900), (64, 64))
SMALL, SMALL_PAGE = (64, 48), (150, 200)


def workloads(model: Model, *, budget: int, small: bool) -> list[Workload]:
    """What fits into ``budget`` tokens; with ``small`` the shapes of a test."""
    lengths = [16] if small else [1024, 512, 128, 32]
    found = [
        Workload(name=f"text, {length} tokens", tokens=length, items=4 if small else max(1, budget // length))
        for length in lengths
        if length <= model.max_tokens
    ]
    if not small:
        found.append(Workload(name=f"text, 9 to {_longest(model)} tokens", tokens=-1))
    if model.vision is None or model.vision.gives_output:
        return found
    for name, size in _named(small):
        length = len(image_tokens(model, model.plan(*size, param="image")))
        found.append(Workload(name=f"{name} + text", size=size, items=max(1, budget // length)))
    return found


def _longest(model: Model) -> int:
    """The most tokens of a text in a batch of mixed lengths."""
    return min(1024, model.max_tokens)


def image_sets(model: Model, *, budget: int, small: bool) -> list[Images]:
    """One image of each kind, and as many as ``budget`` units have room for; mixed sizes last."""
    found = []
    for name, size in _named(small):
        units = model.plan(*size, param="image").units
        found += [
            Images(name=f"vision, {count} x {name}", sizes=(size,) * count)
            for count in sorted({1, max(1, budget // units)})
        ]
    if small:
        return found
    mixed: list[Size] = []
    total = 0
    for size in cycle(MIXED):
        total += model.plan(*size, param="image").units
        if total > budget:
            break
        mixed.append(size)
    return [*found, Images(name=f"vision, {len(mixed)} mixed", sizes=tuple(mixed))] if mixed else found


def _named(small: bool) -> list[tuple[str, Size]]:
    sizes = (SMALL, SMALL_PAGE) if small else (IMAGE, PAGE)
    return [
        (f"{what} {size[0]}x{size[1]}", size) for what, size in zip(("image", "page"), sizes, strict=True)
    ]


def vision_batch(model: Model, sizes: Sequence[Size], *, seed: int) -> VisionBatch:
    """Images of noise."""
    random = np.random.default_rng(seed)
    assert model.vision is not None
    shape = model.vision.unit_shape
    plans = [model.plan(*size, param="image") for size in sizes]
    return pack_images(
        [
            Pixels(values=random.integers(0, 256, (plan.units, *shape), dtype=np.uint8), plan=plan)
            for plan in plans
        ],
        [model.unit_positions(plan) for plan in plans],
    )


def image_tokens(model: Model, plan: ImagePlan) -> Int32Array:
    """An image and a few words, as a prompt; for a reranker the words are the query."""
    if isinstance(model, PairModel):
        return scored_tokens(model, IMAGE_TEXT, plan)
    content = Content(parts=(plan, IMAGE_TEXT), role=Role.PASSAGE)
    return model.prompt(content, max_tokens=model.max_tokens, truncate=Truncate.NONE, param="input").tokens


def scored_tokens(model: Model, query: str, document: Part) -> Int32Array:
    """A document as the text engine reads it when it is scored: with the query, or on its own."""
    content = Content(parts=(document,), role=Role.PASSAGE)
    if not isinstance(model, PairModel):
        return model.prompt(
            content, max_tokens=model.max_tokens, truncate=Truncate.NONE, param="document"
        ).tokens
    pairs = Pairs(
        query=Content(parts=(query,), role=Role.QUERY),
        documents=[content],
        limits=PairLimits(tokens=model.max_tokens),
        param="query",
        params=["document"],
    )
    (made,) = model.pairs(pairs)
    if isinstance(made, TesseraError):
        raise made
    return made.tokens


def workload_tokens(model: Model, workload: HttpWorkload) -> int:
    """The tokens of one of the workload's inputs, as the text engine reads it; 0 of an image alone."""
    if workload.alone:
        return 0
    if workload.size is not None:
        return len(image_tokens(model, model.plan(*workload.size, param="image")))
    if not workload.query:
        # Of a model that pads all texts to one length it is that.
        shortest = Content(parts=(IMAGE_TEXT,))
        prompt = model.prompt(shortest, max_tokens=model.max_tokens, truncate=Truncate.END, param="input")
        return max(workload.tokens, len(prompt.tokens))
    body = json.loads(next(iter(Bodies(workload, CheckpointWords(model.path), "", seed=0, variety=1))).data)
    return len(scored_tokens(model, body["queries"], body["documents"][0]))


def words(model: Model, length: int, random: np.random.Generator) -> Int32Array:
    """Ordinary words only, none of the control tokens at the end of the vocabulary."""
    most = model.vocab_size - 300 if model.vocab_size > 3000 else model.vocab_size // 2
    return random.integers(0, most, length, dtype=np.int32)


def text_batch(
    model: Model, workload: Workload, rows: torch.Tensor | None, *, seed: int, budget: int = 0
) -> TextBatch:
    """A batch of the workload; ``rows`` are the vision rows of one image, used for every item."""
    random = np.random.default_rng(seed)
    if workload.size is not None:
        assert rows is not None
        plan = model.plan(*workload.size, param="image")
        tokens = image_tokens(model, plan)
        one = PackedInput(
            tokens=tokens,
            positions=model.positions(tokens, (plan,)),
            vision=(rows,),
            vision_index=model.vision_index(tokens),
        )
        return pack([one] * workload.items)
    lengths = [workload.tokens] * workload.items
    if workload.tokens < 0:
        lengths = []
        while sum(lengths) < budget:
            lengths.append(min(int(random.integers(9, _longest(model) + 1)), budget - sum(lengths)))
    return pack([text_input(model, words(model, length, random)) for length in lengths])


def text_input(model: Model, tokens: Int32Array) -> PackedInput:
    return PackedInput(tokens=tokens, positions=model.positions(tokens, ()))
